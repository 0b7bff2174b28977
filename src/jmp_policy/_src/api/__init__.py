"""What a user calls that asks several rooms: wrap, check, the command line, names of other libraries."""
