"""Parameters stored in half precision: master weights, Kahan summation, stochastic rounding."""
