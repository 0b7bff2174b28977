"""Summarises models: which rule governs each module, and the dtypes of its values."""
