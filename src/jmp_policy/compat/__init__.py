"""Offers the names of other libraries, for programs that move to this one import at a time."""
