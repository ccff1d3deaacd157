"""A connection over which nothing comes any more, and nobody who would say so: it is cut off after a while."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

from dblock.errors import Unavailable


@contextlib.contextmanager
def bounded(connection: Any, seconds: float) -> Iterator[None]:
    """Cut the connection off if this takes too long; whoever waits for an answer then has Unavailable instead."""
    late = threading.Event()
    # A handle of its own: the connection may close its while this is about to be used.
    with socket.socket(fileno=os.dup(connection.fileno())) as handle:

        def cut() -> None:
            late.set()
            with contextlib.suppress(OSError):
                handle.shutdown(socket.SHUT_RDWR)

        cutting = threading.Timer(seconds, cut)
        cutting.daemon = True
        cutting.start()
        try:
            yield
        except Exception as error:
            if late.is_set():
                raise Unavailable(f"The database did not answer within {seconds:g} s.") from error
            raise
        finally:
            cutting.cancel()
            cutting.join()
