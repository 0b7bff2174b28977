"""Reports: what runs in which precision, where gradients vanish, what the compilers make of it."""
