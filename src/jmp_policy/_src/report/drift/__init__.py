"""Where a half-precision program departs from its float32 replay."""
