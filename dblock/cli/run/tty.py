"""Our terminal: whose it is, and giving it to another process group and back."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import termios
from typing import Any

from dblock.cli.run.tree import send_group


class Tty:
    """The terminal that we are at. It is given away only by whom it belongs to."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._modes: list[Any] | None = None

    @property
    def group(self) -> int | None:
        """The group in the foreground; None when the terminal is gone."""
        try:
            return os.tcgetpgrp(self._number)
        except OSError:
            return None

    def is_ours(self) -> bool:
        """Whether we are in the foreground."""
        return self.group == os.getpgrp()

    def give(self, group: int) -> None:
        """Put another group in the foreground."""
        # Who is not in the foreground would be stopped for doing this.
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            with contextlib.suppress(OSError):
                os.tcsetpgrp(self._number, group)
        finally:
            signal.signal(signal.SIGTTOU, before)

    def take_back(self, group: int) -> None:
        """Be in the foreground again, if that group was, or one that is gone; a shell may have it meanwhile."""
        front = self.group
        if front is not None and (front == group or not send_group(front, 0)):
            self.give(os.getpgrp())

    def remember(self) -> None:
        """Remember its modes."""
        with contextlib.suppress(termios.error):
            self._modes = termios.tcgetattr(self._number)

    def restore(self) -> None:
        """Set its modes as they were, after one that had no time to."""
        if self._modes is not None and self.is_ours():
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._number, termios.TCSADRAIN, self._modes)


@functools.cache
def our_tty() -> Tty | None:
    """Return the terminal of our session, wherever our input comes from; None if it has none."""
    try:
        return Tty(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return None
