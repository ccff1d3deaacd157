"""The story's workers as their conductor has them: processes that are told a word, and report what came of it.

Whatever happens to the conductor, no worker is left behind: it kills them when it ends in order, frozen ones too.
Each is in a process group of its own, so that Ctrl-C is the conductor's alone; and should the conductor be killed,
the kernel hangs up on such a group and wakes it for that (POSIX calls it orphaned).
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
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, for it is closed with the worker
        self._heard = b""
        # The DSN goes by the environment: a command line can be read by every user of the machine.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dblock.cli.demo.worker", name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ | {"DBLOCK_DSN": conninfo},
            preexec_fn=os.setpgrp,
        )

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    def tell(self, word: str, *arguments: str) -> None:
        """Give it a cue."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([word, *arguments]).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def hear(self, patience: float) -> dict[str, Any] | None:
        """Return its next report; None when there is none within this time."""
        assert self._process.stdout is not None
        gives_up = time.monotonic() + patience
        while b"\n" not in self._heard:
            left = gives_up - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return None
            part = os.read(self._process.stdout.fileno(), 65536)
            if not part:
                raise self._ended()
            self._heard += part
        line, _, self._heard = self._heard.partition(b"\n")
        report: dict[str, Any] = json.loads(line)
        if "error" in report:
            kind = Unavailable if report["unavailable"] else DblockError
            raise kind(f"Worker {self.name}: {report['error']}")
        return report

    def freeze(self) -> float:
        """Stop it, and return when it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            raise self._ended()
        return time.monotonic()

    def wake(self) -> float:
        """Let it go on, and return since when."""
        woken = time.monotonic()
        self._process.send_signal(signal.SIGCONT)
        return woken

    def kill(self) -> float:
        """End it as nothing can be ended more suddenly, and return when that was."""
        killed = time.monotonic()
        self._process.kill()
        self._process.wait()
        return killed

    def _ended(self) -> DblockError:
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip().splitlines()
        return DblockError(f"Worker {self.name} ended unexpectedly{f': {said[-1]}' if said else ''}.")

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # a cue that nobody heard any more
                pipe.close()
        self._process.wait()
