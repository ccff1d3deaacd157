"""The log records about the end of a lease, with their fields."""

from __future__ import annotations

import logging

from dblock._core.replies import log_fields, with_token

logger = logging.getLogger("dblock")


def released(name: str, lock: str, token: int) -> None:
    """Log that the database has confirmed a release."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("lock %r: released%s", name, with_token(token), extra=log_fields(lock, token))


def lost(name: str, lock: str, token: int, reason: str) -> None:
    """Log the loss of a lease."""
    fields = log_fields(lock, token, reason=reason)
    logger.debug("lock %r: lease%s lost, %s", name, with_token(token, " under "), reason, extra=fields)


def callback_failed(name: str) -> None:
    """Log the error that is being handled: one callback at the end of a lease has raised it."""
    logger.exception("callback at the end of a lease failed (lock %r)", name)
