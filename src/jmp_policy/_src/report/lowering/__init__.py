"""Reports what XLA's compilers for GPUs and TPUs make of a program: its kernels, and its memory."""
