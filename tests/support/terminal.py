"""Run a command in a terminal: a real pty, and the screen that a user would see."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import pyte

from tests.support.eventually import eventually
from tests.support.warm_start import Program

PATIENCE = 30.0


class Terminal:
    """Runs a command as the leader of a session with this terminal, and draws its output on a screen."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        columns: int = 100,
        rows: int = 30,
        env: dict[str, str] | None = None,
    ) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._drawing = threading.Lock()
        self.raw = b""
        """The whole output of the command, with its control characters."""
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        } | {"TERM": "xterm-256color", **(env or {})}
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.settings = termios.tcgetattr(slave)
        """The settings of the terminal when the command began."""
        self._process = Program(command, stdin=slave, stdout=slave, stderr=slave, env=environment, terminal=True)
        self.pid = self._process.pid
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def press(self, keys: str) -> None:
        """Type these keys."""
        os.write(self._master, keys.encode())

    def lines(self) -> list[str]:
        """Return the lines of the screen."""
        with self._drawing:
            return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines())

    def wait_for(self, text: str) -> str:
        """Return the screen as soon as it shows this text."""
        (seen,) = self._eventually(lambda: text in (seen := self.text) and (seen,), f"{text!r} appears")
        return str(seen)

    def wait_while(self, text: str) -> str:
        """Return the screen as soon as it no longer shows this text."""
        (seen,) = self._eventually(lambda: text not in (seen := self.text) and (seen,), f"{text!r} disappears")
        return str(seen)

    def wait_for_job(self) -> None:
        """Return as soon as the shell has put a job in the foreground, with the terminal's modes for lines of input.

        What is typed earlier is the shell's own input: it is not shown, and its Enter ends no line of the job's input.
        """
        self._eventually(
            lambda: os.tcgetpgrp(self._master) != self.pid and termios.tcgetattr(self._master)[3] & termios.ICANON,
            "a job is in the foreground",
        )

    def resize(self, columns: int, rows: int) -> None:
        """Change the size of the window."""
        with self._drawing:
            self._screen.resize(rows, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def settings_now(self) -> list[object]:
        """Return the present settings of the terminal."""
        return termios.tcgetattr(self._master)

    def ended(self) -> int:
        """Wait for the command's end, and return its exit code."""
        self._eventually(lambda: self._process.poll() is not None, "the command ends")
        self._reader.join(5)
        return self._process.wait()

    def _eventually(self, holds: Callable[[], Any], what: str) -> Any:
        return eventually(holds, lambda: f"{what}; the screen:\n{self.text}")

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._master, 65536)
            except OSError:
                return  # the last process with this terminal has ended
            if not part:
                return
            with self._drawing:
                self.raw += part
                self._stream.feed(part)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reader.join(5)
        os.close(self._master)
