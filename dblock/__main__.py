"""`python -m dblock` is the `dblock` command."""

import sys


def main() -> int:
    """Run the command; an interrupt is one from the first moment on, while modules are still being imported."""
    try:
        from dblock.cli import main as command

        return command()
    except KeyboardInterrupt:
        sys.stderr.write("dblock: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
