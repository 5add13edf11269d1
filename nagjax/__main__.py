"""`python -m nagjax`: the command line."""

import sys

from nagjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
