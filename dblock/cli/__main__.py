"""Run the `dblock` command with `python -m dblock.cli`."""

import sys

from dblock.cli import main

if __name__ == "__main__":
    sys.exit(main())
