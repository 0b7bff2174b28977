"""Other libraries' names on top of this one, for programs that move here one import at a time."""
