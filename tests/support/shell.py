"""The command as a shell runs it: a real process, its output, its exit code."""

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
    """What became of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """Runs `dblock` against one database, in a folder of its own; ends what is still running."""

    def __init__(self, dsn: str | None, folder: Path) -> None:
        self.dsn = dsn
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def command(self, *arguments: str, dsn: str | None = None) -> list[str]:
        """Return the command line; the database comes before the command's own words, which may end in another."""
        where = dsn or self.dsn
        return [sys.executable, "-m", "dblock", *(["--dsn", where] if where else []), *arguments]

    def start(self, *arguments: str, dsn: str | None = None, env: dict[str, str] | None = None, **options: Any) -> Any:
        """Start it and go on; its output is text."""
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
        """Run it to its end."""
        return ended(self.start(*arguments, dsn=dsn, **options))

    def close(self) -> None:
        for one in self._started:
            if one.poll() is None:
                one.send_signal(signal.SIGCONT)
                one.kill()
            one.communicate()


def ended(process: Any) -> Done:
    """Wait for a command's end; whatever it was, it has left no traceback."""
    out, err = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in (err or ""), err
    return Done(process.returncode, out or "", err or "")


def until(holds: Callable[[], Any], what: str = "it") -> Any:
    """Wait until something holds, and return it."""
    gives_up = time.monotonic() + PATIENCE
    while not (found := holds()):
        assert time.monotonic() < gives_up, f"{what} never came"
        time.sleep(0.01)
    return found
