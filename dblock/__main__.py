"""`python -m dblock` is the `dblock` command."""

import sys

from dblock.cli import main

sys.exit(main())
