"""Trains parameters stored in half precision: master weights, Kahan summation, stochastic rounding."""
