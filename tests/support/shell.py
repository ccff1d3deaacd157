"""Run the `dblock` command as a shell does, with its output and exit code: in a process of its own, or in this one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from dblock import cli
from tests.support.warm_start import Program

PATIENCE = 60.0

NEED_A_PROCESS = {"run", "migrate", "once", "elect", "watch", "demo", "bench", "reaper"}
"""Commands that fork, handle signals or start processes."""


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
        self._started: list[subprocess.Popen[Any]] = []

    def command(self, *arguments: str, dsn: str | None = None) -> list[str]:
        """Return the command line. `--dsn` comes before the arguments, because they may end in a command to run."""
        where = dsn or self.dsn
        return [sys.executable, "-m", "dblock", *(["--dsn", where] if where else []), *arguments]

    def start(self, *arguments: str, dsn: str | None = None, env: dict[str, str] | None = None, **options: Any) -> Any:
        """Start the command without waiting for its end. Its output is text.

        With `cold`, it starts with no imports done, and with its own arguments in `ps`.
        """
        options.setdefault("stdin", subprocess.DEVNULL)
        started = (subprocess.Popen if options.pop("cold", False) else Program)(
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
        """Run the command to its end: in this process, which takes a tenth of the time, unless it needs its own."""
        if not options.keys() <= {"env", "cwd"} or NEED_A_PROCESS & {*arguments}:
            return self.run_process(*arguments, dsn=dsn, **options)
        return self.run_here(*arguments, dsn=dsn, **options)

    def run_here(self, *arguments: str, dsn: str | None = None, env: Any = None, cwd: Path | None = None) -> Done:
        """Run the command to its end, in this process."""
        return run_here(self.command(*arguments, dsn=dsn)[3:], cwd or self.folder, env)

    def run_process(self, *arguments: str, dsn: str | None = None, **options: Any) -> Done:
        """Run the command to its end, in a process of its own."""
        return ended(self.start(*arguments, dsn=dsn, **options))

    def close(self) -> None:
        for one in self._started:
            if one.poll() is None:
                one.send_signal(signal.SIGCONT)
                one.kill()
            one.communicate()


def run_here(arguments: list[str], folder: Path, env: dict[str, str] | None = None) -> Done:
    """Run the command to its end in this process, in a folder, with additional environment variables."""
    out, err, before = io.StringIO(), io.StringIO(), os.getcwd()
    os.chdir(folder)
    try:
        with (
            open(os.devnull) as nothing,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.object(sys, "stdin", nothing),
            mock.patch.object(sys, "argv", ["dblock", *arguments]),
            mock.patch.dict(os.environ, env or {}),
            # It closes this process's own standard output.
            mock.patch.object(cli, "_discard_output", return_value=None),
        ):
            code = cli.main(arguments)
    finally:
        os.chdir(before)
    assert "Traceback" not in err.getvalue(), err.getvalue()
    return Done(code, out.getvalue(), err.getvalue())


def ended(process: Any) -> Done:
    """Wait for a command's end, and check that it has printed no traceback, whatever its exit code."""
    out, err = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in (err or ""), err
    return Done(process.returncode, out or "", err or "")
