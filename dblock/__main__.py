"""`python -m dblock` is the `dblock` command."""

import gc
import sys


def main() -> int:
    """Run the command; an interrupt is one from the first moment on, while modules are still being imported."""
    # Most of a short command is imports, and a fifth of that the search for garbage among what they leave for good.
    gc.set_threshold(100_000, 50, 50)
    try:
        from dblock.cli import main as command

        return command()
    except KeyboardInterrupt:
        sys.stderr.write("dblock: interrupted\n")
        return 130
    finally:
        gc.freeze()  # nor is it looked for once more at the very end


if __name__ == "__main__":
    sys.exit(main())
