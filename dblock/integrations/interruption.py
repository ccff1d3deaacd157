"""Interrupt a thread whose lease is lost.

Python raises LeaseInterrupt in the thread at its next bytecode. A blocking call into C is interrupted when it returns.
LeaseInterrupt is no Exception, so `except Exception` does not stop it. Greenlets (gevent, eventlet) share one thread
and are not interrupted: their code learns of the loss when it leaves the lease.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dblock.errors import LeaseLost
    from dblock.lease import AsyncLease, Lease


class LeaseInterrupt(BaseException):
    """Raised in a thread when its lease is lost. `interrupted_by_loss` turns it into LeaseLost."""


@contextmanager
def interrupted_by_loss(lease: Lease | AsyncLease) -> Iterator[None]:
    """Interrupt the body, in this thread, when the lease is lost."""
    thread = threading.get_ident()
    mutex = threading.Lock()
    state = {"runs": True, "sent": False}

    def interrupt(_: LeaseLost) -> None:
        with mutex:
            if state["runs"]:
                state["sent"] = True
                _raise_in(thread, LeaseInterrupt)

    if not _has_greenlets():
        lease.on_lost(interrupt)
    try:
        try:
            yield
        finally:
            with mutex:
                state["runs"] = False
            if state["sent"]:
                # The interrupt may not have arrived yet. Withdraw it, so that it does not hit the code after the body.
                _raise_in(thread, None)
    except LeaseInterrupt:
        lease.raise_if_lost()
        raise


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    argument = ctypes.py_object() if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), argument)


def _has_greenlets() -> bool:
    """Return whether gevent or eventlet has replaced threads by greenlets, or this is not CPython."""
    module = getattr(threading.get_ident, "__module__", "") or ""
    return sys.implementation.name != "cpython" or module.split(".")[0] in ("gevent", "eventlet")
