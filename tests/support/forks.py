"""Run code in the child of a fork."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable


def run_in_fork(body: Callable[[], object]) -> int:
    """Run the body in the child of a fork, and return the child's exit code: 0 if the body returns a true value."""
    with warnings.catch_warnings():
        # Python warns because this process has threads. The tests are about exactly that.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 2
        try:
            signal.alarm(20)
            code = 0 if body() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
