"""Copy the command's standard error, and keep its last lines for the ledger.

A command may behave differently when its standard error is no terminal: it may print no colours, or buffer more. So the
copy is made only where standard error is no terminal to begin with. There the command has a pipe instead of another
pipe or a file, and what it writes is passed on at once.
"""

from __future__ import annotations

import os
import re
import threading

MAX_LINES, MAX_BYTES = 20, 4000
"""How much of the end of the output is kept."""

DRAIN_PATIENCE = 5.0
"""Seconds that a slow reader of standard error has to take the rest after the command has ended."""

_PASSWORD = re.compile(
    r"(://[^\s:/@]*:)[^\s@]+(?=@)|(password\s*=\s*)('[^']*'|\S+)|(\bpassword\s+)'[^']*'", re.IGNORECASE
)


class ErrorOutput:
    """The pipe between the command's standard error and this process's. Create it before the keeper is forked."""

    def __init__(self) -> None:
        self._reader: int | None = None
        self.writer: int | None = None
        """What the command gets as its standard error; None if it gets this process's."""
        self._tail = b""
        self._thread: threading.Thread | None = None
        if _can_be_copied():
            self._reader, self.writer = os.pipe()

    @property
    def is_kept(self) -> bool:
        """Whether the output is kept."""
        return self._reader is not None

    def start(self) -> None:
        """Begin to copy, after the keeper has its end of the pipe."""
        if self.writer is not None and self._thread is None:
            os.close(self.writer)
            self._thread = threading.Thread(target=self._copy, name="dblock-error-output", daemon=True)
            self._thread.start()

    def last_lines(self) -> str:
        """Return the last lines, without passwords, after the command has ended."""
        if self._thread is not None:
            self._thread.join(DRAIN_PATIENCE)
        text = self._tail[-MAX_BYTES:].decode(errors="replace").replace("\0", "")
        lines = [line for line in text.splitlines() if line.strip()][-MAX_LINES:]
        return masked("\n".join(lines))

    def _copy(self) -> None:
        assert self._reader is not None
        try:
            while part := os.read(self._reader, 65536):
                self._tail = (self._tail + part)[-4 * MAX_BYTES :]
                while part:
                    part = part[os.write(2, part) :]
        except OSError:
            pass  # standard error is closed: the command learns it from its own pipe, which is closed now
        finally:
            os.close(self._reader)


def masked(text: str) -> str:
    """Return a text without the passwords in URLs, in `password=…` and `PGPASSWORD=…`, and in `PASSWORD '…'` of SQL."""
    return _PASSWORD.sub(lambda found: f"{found[1] or found[2] or found[4]}***", text)


def _can_be_copied() -> bool:
    """Return whether standard error is open, and no terminal."""
    try:
        os.fstat(2)
    except OSError:
        return False
    return not os.isatty(2)
