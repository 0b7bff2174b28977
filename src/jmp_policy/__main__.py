"""`python -m jmp_policy`: look before you code."""

import sys

from jmp_policy._src.api.command_line import main

if __name__ == "__main__":
    sys.exit(main())
