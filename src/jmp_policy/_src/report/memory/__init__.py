"""What the memory of a training step holds when most of it is in use."""
