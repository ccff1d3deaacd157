"""Histories: what every process did, from when to when, and how it ended; the one thing that checkers look at.

An operation is written down before it begins and once more when it has ended, each as a line of JSON in a file of the
process's own. So a process that is killed in the middle leaves an operation without an end, and one that got no answer
says so. Both have an unknown outcome, and may take effect at any time from their beginning on: their end is infinity.

All times are of the machine's one monotonic clock, which all processes on it share.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

OK, FAILED, UNKNOWN = "ok", "failed", "unknown"
"""It was done; it certainly was not; nobody can tell."""


@dataclass(frozen=True)
class Operation:
    """One thing that one process did to one key: a lock, a resource, or the name of a fault."""

    process: str
    kind: str
    key: str
    called: float
    returned: float
    outcome: str
    said: dict[str, Any] = field(default_factory=dict)
    """What was asked for, and what was answered."""

    @property
    def ok(self) -> bool:
        return self.outcome == OK

    @property
    def token(self) -> int:
        return int(self.said["token"])

    def __str__(self) -> str:
        end = "…" if math.isinf(self.returned) else f"{self.returned:.4f}"
        said = " ".join(f"{name}={value}" for name, value in self.said.items())
        return f"[{self.called:.4f}, {end}] {self.process} {self.kind} {self.key} {self.outcome} {said}"


class Recorder:
    """Writes the history of one process."""

    def __init__(self, path: Path) -> None:
        # Straight to the kernel: what was written is there, whatever becomes of this process.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._numbers = itertools.count()
        self._process = os.getpid()

    def do(
        self,
        kind: str,
        key: str,
        call: Callable[[], T],
        *,
        refused: tuple[type[BaseException], ...] = (),
        unknown: tuple[type[BaseException], ...] = (),
        told: Callable[[T], dict[str, Any]] = lambda _: {},
        **said: Any,
    ) -> T | None:
        """Do it and write down how it went; the result is None when it was refused, or its outcome is unknown.

        `refused` are the errors that mean that certainly nothing was done. Any other error goes on its way.
        """
        number = self.begin(kind, key, **said)
        try:
            result = call()
        except refused as error:
            self.end(number, FAILED, error=_short(error))
            return None
        except unknown as error:
            self.end(number, UNKNOWN, error=_short(error))
            return None
        self.end(number, OK, **told(result))
        return result

    def begin(self, kind: str, key: str, **said: Any) -> int:
        """Write down that something begins."""
        number = next(self._numbers)
        self._write({"id": number, "at": time.monotonic(), "kind": kind, "key": key, "said": said})
        return number

    def end(self, number: int, outcome: str, **said: Any) -> None:
        """Write down how it ended."""
        self._write({"id": number, "at": time.monotonic(), "outcome": outcome, "said": said})

    def note(self, kind: str, key: str, *, called: float | None = None, **said: Any) -> None:
        """Write down something that has been done already, since `called`."""
        at = time.monotonic() if called is None else called
        number = next(self._numbers)
        self._write({"id": number, "at": at, "kind": kind, "key": key, "said": said})
        self.end(number, OK)

    def _write(self, line: dict[str, Any]) -> None:
        # The child of a fork counts on from the same number: what it wrote here could not be told from the parent's.
        assert os.getpid() == self._process, "every process writes a history of its own"
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


class History:
    """All that was done in one run, in the order in which it was begun."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        self.operations = sorted(operations, key=lambda one: one.called)

    @classmethod
    def read(cls, folder: Path) -> History:
        """Put together what the processes of a run have written."""
        return cls(itertools.chain.from_iterable(_read(path) for path in sorted(folder.glob("*.jsonl"))))

    def __len__(self) -> int:
        return len(self.operations)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def of(self, *kinds: str) -> list[Operation]:
        """Return the operations of these kinds."""
        return [one for one in self.operations if one.kind in kinds]

    def by_key(self, *kinds: str) -> dict[str, list[Operation]]:
        """Return the operations of these kinds for each key."""
        found: dict[str, list[Operation]] = defaultdict(list)
        for one in self.of(*kinds):
            found[one.key].append(one)
        return dict(found)

    @property
    def faults(self) -> list[Operation]:
        """What was done to the processes, the network and the server."""
        return self.of("fault")


def _read(path: Path) -> Iterator[Operation]:
    begun: dict[int, dict[str, Any]] = {}
    for text in path.read_bytes().split(b"\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue  # nothing, or the half of a line that a killed process had written
        if "kind" in line:
            begun[line["id"]] = line
        else:
            yield _operation(path.stem, begun.pop(line["id"]), line)
    for line in begun.values():
        yield _operation(path.stem, line, {"at": math.inf, "outcome": UNKNOWN, "said": {}})


def _operation(process: str, begin: dict[str, Any], end: dict[str, Any]) -> Operation:
    returned = math.inf if end["outcome"] == UNKNOWN else end["at"]
    return Operation(
        process, begin["kind"], begin["key"], begin["at"], returned, end["outcome"], begin["said"] | end["said"]
    )


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
