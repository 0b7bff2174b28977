"""Magnitudes of gradients and activations, counted by their exponents."""
