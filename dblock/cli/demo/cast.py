"""The story's workers, seen from the conductor: processes that take a command and report its result.

Whatever happens to the conductor, no worker is left behind. If the conductor ends normally, it kills them, frozen ones
too. Each worker is in its own process group, so that Ctrl-C reaches only the conductor. If the conductor is killed,
the kernel sends SIGHUP and SIGCONT to such a group (POSIX calls the group orphaned).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import IO, Any

from dblock.errors import DblockError, Unavailable


class Worker:
    """A worker process."""

    def __init__(self, name: str, conninfo: str, *arguments: str) -> None:
        self.name = name
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, because it is closed with the worker
        self._inbox = b""
        # The DSN is passed in the environment, because every user of the machine can read a command line.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dblock.cli.demo.worker", name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=os.environ | {"DBLOCK_DSN": conninfo},
            preexec_fn=os.setpgrp,
        )

    @property
    def pid(self) -> int:
        """The process ID."""
        return self._process.pid

    def send(self, word: str, *arguments: str) -> None:
        """Send a command to the worker."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([word, *arguments]).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended_error() from None

    def receive(self, patience: float) -> dict[str, Any] | None:
        """Return the worker's next report; None if it sends none within this time."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + patience
        while b"\n" not in self._inbox:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return None
            part = os.read(self._process.stdout.fileno(), 65536)
            if not part:
                raise self._ended_error()
            self._inbox += part
        line, _, self._inbox = self._inbox.partition(b"\n")
        report: dict[str, Any] = json.loads(line)
        if "error" in report:
            kind = Unavailable if report["unavailable"] else DblockError
            raise kind(f"Worker {self.name}: {report['error']}")
        return report

    def freeze(self) -> float:
        """Freeze the process, and return the time at which it had stopped."""
        self._process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            raise self._ended_error()
        return time.monotonic()

    def wake(self) -> float:
        """Let the process continue, and return the time of that."""
        woken = time.monotonic()
        self._process.send_signal(signal.SIGCONT)
        return woken

    def kill(self) -> float:
        """Kill the process with SIGKILL, and return the time of that."""
        killed = time.monotonic()
        self._process.kill()
        self._process.wait()
        return killed

    def _ended_error(self) -> DblockError:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return DblockError(f"Worker {self.name} ended unexpectedly{f': {lines[-1]}' if lines else ''}.")

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # a command that the worker did not read any more
                pipe.close()
        self._process.wait()
