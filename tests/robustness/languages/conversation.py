"""Talk to a program that uses a client of docs/languages: tell it what to do, and hear what it says."""

from __future__ import annotations

import queue
import subprocess
import threading
from types import TracebackType

from tests.robustness.languages.programs import ROOT, command, variables


class Conversation:
    """A program that acquires, watches and releases one lease at a time, as it is told."""

    def __init__(self, language: str, dsn: str) -> None:
        self._program = subprocess.Popen(
            command(language, "converse"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=variables(dsn),
            cwd=ROOT,
        )
        self._heard: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self._program.stdout is not None
        for line in self._program.stdout:
            self._heard.put(line.removesuffix("\n"))

    def hear(self, timeout: float = 30) -> str:
        """Return the next line that the program says: a reply, or `lost`."""
        return self._heard.get(timeout=timeout)

    def is_silent(self) -> bool:
        """Return whether the program has said nothing more."""
        return self._heard.empty()

    def tell(self, verb: str, *values: object) -> None:
        """Tell the program what to do next. It replies when it is done."""
        assert self._program.stdin is not None
        self._program.stdin.write("\t".join([verb, *map(str, values)]) + "\n")
        self._program.stdin.flush()

    def ask(self, verb: str, *values: object) -> str:
        """Tell the program what to do, and return its reply."""
        self.tell(verb, *values)
        return self.hear()

    def acquire(self, name: str, ttl: float) -> int:
        """Let the program acquire the lock, and return the token."""
        word, _, token = self.ask("acquire", name, ttl, 20).partition(" ")
        assert word == "granted", token
        return int(token)

    def __enter__(self) -> Conversation:
        assert self.hear() == "ready"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        try:
            self._program.stdin.close()
            ended = self._program.wait(30)
        finally:
            self._program.kill()
            self._program.wait()
            self._listener.join()
            self._program.stdout.close()
        assert error or ended == 0
