"""The controlling terminal: which process group is in its foreground, and how to change that."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import termios
from typing import Any

from dblock.cli.run.process_tree import signal_group


class ControllingTerminal:
    """The terminal of our session. Only the process group in the foreground hands it on."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._modes: list[Any] | None = None

    @property
    def group(self) -> int | None:
        """The process group in the foreground; None if the terminal is gone."""
        try:
            return os.tcgetpgrp(self._fd)
        except OSError:
            return None

    def in_foreground(self) -> bool:
        """Return whether our process group is in the foreground."""
        return self.group == os.getpgrp()

    def set_foreground(self, group: int) -> None:
        """Put a process group in the foreground."""
        # The kernel sends SIGTTOU to a background process that does this, which would stop it.
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            with contextlib.suppress(OSError):
                os.tcsetpgrp(self._fd, group)
        finally:
            signal.signal(signal.SIGTTOU, before)

    def reclaim(self, group: int) -> None:
        """Return to the foreground if that group is there, or a group that has ended; not if a shell took over."""
        front = self.group
        if front is not None and (front == group or not signal_group(front, 0)):
            self.set_foreground(os.getpgrp())

    def save_modes(self) -> None:
        """Save the terminal's modes for `restore_modes`."""
        with contextlib.suppress(termios.error):
            self._modes = termios.tcgetattr(self._fd)

    def restore_modes(self) -> None:
        """Restore the saved modes, after a command that was killed before it could."""
        if self._modes is not None and self.in_foreground():
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._modes)


@functools.cache
def controlling_terminal() -> ControllingTerminal | None:
    """Return the terminal of our session, even if standard input is something else; None if there is none."""
    try:
        return ControllingTerminal(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return None
