"""Offers what needs several rooms: wrap, check, the command line, the names of other libraries."""
