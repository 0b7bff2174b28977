"""Policies for modules of Flax, by the means of each of its two frameworks."""
