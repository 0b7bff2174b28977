"""NNX: settings of Flax's layers, and subclasses whose calls cast."""
