"""Run the `dblock` command as a shell does: a real process, its output, its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

PATIENCE = 30.0


class Done(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """Runs `dblock` against one database, in a folder of its own, and ends the processes that still run."""

    def __init__(self, dsn: str | None, folder: Path) -> None:
        self.dsn = dsn
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def command(self, *arguments: str, dsn: str | None = None) -> list[str]:
        """Return the command line. `--dsn` comes before the arguments, because they may end in a command to run."""
        where = dsn or self.dsn
        return [sys.executable, "-m", "dblock", *(["--dsn", where] if where else []), *arguments]

    def start(self, *arguments: str, dsn: str | None = None, env: dict[str, str] | None = None, **options: Any) -> Any:
        """Start the command without waiting for its end. Its output is text."""
        options.setdefault("stdin", subprocess.DEVNULL)
        started = subprocess.Popen(
            self.command(*arguments, dsn=dsn),
            stdout=options.pop("stdout", subprocess.PIPE),
            stderr=subprocess.PIPE,
            text=True,
            cwd=options.pop("cwd", self.folder),
            env=os.environ | (env or {}),
            **options,
        )
        self._started.append(started)
        return started

    def run(self, *arguments: str, dsn: str | None = None, **options: Any) -> Done:
        """Run the command to its end."""
        return ended(self.start(*arguments, dsn=dsn, **options))

    def close(self) -> None:
        for one in self._started:
            if one.poll() is None:
                one.send_signal(signal.SIGCONT)
                one.kill()
            one.communicate()


def ended(process: Any) -> Done:
    """Wait for a command's end, and check that it has printed no traceback, whatever its exit code."""
    out, err = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in (err or ""), err
    return Done(process.returncode, out or "", err or "")


def until(holds: Callable[[], Any], what: str = "it") -> Any:
    """Wait until the condition returns a true value, and return that value."""
    gives_up = time.monotonic() + PATIENCE
    while not (found := holds()):
        assert time.monotonic() < gives_up, f"{what} did not happen"
        time.sleep(0.01)
    return found
