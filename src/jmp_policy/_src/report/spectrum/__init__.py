"""Counts the magnitudes of gradients and activations by exponent."""
