"""All code of the library, in rooms; a room imports only rooms below it (docs/internals.md)."""
