"""Weight gradients in float32 from products in half precision (`Policy.grad_dtype`)."""
