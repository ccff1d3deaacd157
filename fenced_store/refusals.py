"""Tell the rest of the program of each write that a fence has refused as stale, for metrics and alerts.

    cancel = refusals.observe(lambda error: count(error.resource))

The function is called in the thread that gets the StaleTokenError, before the error is raised. It must return quickly.
An error of the function is logged and goes no further. A refusal is reported in the process that asks the resource: a
client of an HTTP service that refuses reports nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

E = TypeVar("E", bound=Exception)

logger = logging.getLogger("fenced_store")

_observers: list[Callable[[Any], object]] = []

_REPORTED = "_fenced_store_reported"
"""The attribute of a driver's error that was reported: it may be translated more than once."""


def observe(observer: Callable[[Any], object]) -> Callable[[], None]:
    """Call `observer` with every StaleTokenError from now on. Return a function that ends this."""
    _observers.append(observer)

    def cancel() -> None:
        if observer in _observers:
            _observers.remove(observer)

    return cancel


def reported(error: E, cause: BaseException | None = None) -> E:
    """Report a refusal and return its error. A refusal that has a cause is reported once for each cause."""
    if not _observers or getattr(cause, _REPORTED, False):
        return error
    if cause is not None:
        with contextlib.suppress(AttributeError):  # an error of a driver that takes no attributes
            setattr(cause, _REPORTED, True)
    for observer in list(_observers):
        try:
            observer(error)
        except Exception:
            logger.exception("an observer of refusals failed")
    return error
