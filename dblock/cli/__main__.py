"""`python -m dblock.cli` is the `dblock` command, too."""

import sys

from dblock.cli import main

if __name__ == "__main__":
    sys.exit(main())
