"""`python -m dblock` is the `dblock` command."""

import gc
import io
import os
import sys


def _open_standard_files() -> None:
    """Have all three, lest the next file that is opened take the number of one that was closed; for any text."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> int:
    """Run the command; an interrupt is one from the first moment on, while modules are still being imported."""
    # Most of a short command is imports, and a fifth of that the search for garbage among what they leave for good.
    gc.set_threshold(100_000, 50, 50)
    _open_standard_files()
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
