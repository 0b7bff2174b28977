"""Reports what XLA's GPU compiler makes of a program."""
