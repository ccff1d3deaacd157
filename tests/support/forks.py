"""A body of code in the child of a fork."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable


def in_a_child(body: Callable[[], object]) -> int:
    """Run the body in the child of a fork; its exit code is 0 when the body returns something true."""
    with warnings.catch_warnings():
        # That this process has threads is the very point.
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
