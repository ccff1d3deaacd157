"""Shut down the socket of a connection that stops responding."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

from dblock._runtime.threads import start_timer
from dblock.errors import Unavailable


@contextlib.contextmanager
def bounded(connection: Any, seconds: float) -> Iterator[None]:
    """Shut the connection's socket down if the body takes too long. The body then raises Unavailable."""
    late = threading.Event()
    # A handle of its own, because the connection may close its socket just before this one is used.
    with socket.socket(fileno=os.dup(connection.fileno())) as handle:

        def cut() -> None:
            late.set()
            with contextlib.suppress(OSError):
                handle.shutdown(socket.SHUT_RDWR)

        cutting = start_timer("dblock timeout", seconds, cut)
        try:
            yield
        except Exception as error:
            if late.is_set():
                raise Unavailable(f"The database did not answer within {seconds:g} s.") from error
            raise
        finally:
            cutting.cancel()
            cutting.join()
