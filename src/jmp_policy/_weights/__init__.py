"""Weight gradients in float32 from products in half precision (`Policy.grad_dtype`).

`_mark` marks the casts of parameters, `_run` carries the float32 parameters on to where they are used,
`_products` has the products' derivatives, `_function` does it to a function.
"""
