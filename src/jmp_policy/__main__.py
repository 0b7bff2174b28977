"""Runs the command line, `python -m jmp_policy`."""

import sys

from jmp_policy._src.api.command_line import main

if __name__ == "__main__":
    sys.exit(main())
