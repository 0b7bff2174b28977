"""Measurements of jmp_policy against hand-written mixed precision and against its peers."""
