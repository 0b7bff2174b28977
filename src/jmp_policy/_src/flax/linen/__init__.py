"""Linen: a method interceptor casts parameters, inputs and outputs."""
