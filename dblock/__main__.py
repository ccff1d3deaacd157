"""Run the `dblock` command with `python -m dblock`."""

import gc
import io
import os
import sys


def _open_standard_files() -> None:
    """Open whichever of standard input, output and error is closed, and make the outputs accept any text.

    Otherwise the next file that the process opens would get the number of the closed one.
    """
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
    """Run the command. Ctrl-C is reported as an interrupt even while modules are still being imported."""
    # A short command spends most of its time on imports, and a fifth of that on collecting garbage among objects that
    # stay for good.
    gc.set_threshold(100_000, 50, 50)
    _open_standard_files()
    try:
        from dblock.cli import main as command

        return command()
    except KeyboardInterrupt:
        sys.stderr.write("dblock: interrupted\n")
        return 130
    finally:
        gc.freeze()  # skips the last collection at exit, too


if __name__ == "__main__":
    sys.exit(main())
