"""What training and gradients come to in half precision and in float8, against float32."""
