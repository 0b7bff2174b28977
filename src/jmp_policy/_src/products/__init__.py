"""How a matrix product or convolution is computed on a platform."""
