"""Log an outage once when it begins and once when it is over, however often the work is retried in between."""

from __future__ import annotations

import logging

logger = logging.getLogger("dblock")


class Outage:
    """One kind of work that may fail for a while."""

    def __init__(self, over: str, level: int = logging.WARNING) -> None:
        """`over` is the message at the end."""
        self._over = over
        self._level = level
        self._lasts = False

    def failed(self, message: str, *args: object) -> None:
        """Log a failure: at DEBUG if the outage has been logged already."""
        logger.log(logging.DEBUG if self._lasts else self._level, message, *args)
        self._lasts = True

    def worked(self) -> None:
        """Log the end of the outage, if there was one."""
        if self._lasts:
            self._lasts = False
            logger.log(self._level, "%s", self._over)
