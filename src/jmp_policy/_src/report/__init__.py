"""Reports what runs in which precision, where gradients vanish, and what the compilers make of a program."""
