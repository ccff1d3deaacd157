"""Record histories: what every process did, from when to when, and how it ended. Checkers read nothing else.

A process records an operation before it begins and again when it has ended, each as a line of JSON in its own file. A
process that is killed in between leaves an operation without an end. A process that gets no reply records that. Both
operations have an unknown outcome and may take effect at any time after their beginning, so their end is infinity.

All times are from the machine's one monotonic clock, which all its processes share.
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
"""It was done; it certainly was not done; it may have been done."""


@dataclass(frozen=True)
class Operation:
    """One operation of one process on one key: a lock, a resource, or the name of a fault."""

    process: str
    kind: str
    key: str
    called: float
    returned: float
    outcome: str
    details: dict[str, Any] = field(default_factory=dict)
    """The arguments of the request and the contents of the reply."""

    @property
    def ok(self) -> bool:
        return self.outcome == OK

    @property
    def token(self) -> int:
        return int(self.details["token"])

    def __str__(self) -> str:
        end = "…" if math.isinf(self.returned) else f"{self.returned:.4f}"
        details = " ".join(f"{name}={value}" for name, value in self.details.items())
        return f"[{self.called:.4f}, {end}] {self.process} {self.kind} {self.key} {self.outcome} {details}"


class Recorder:
    """Write the history of one process."""

    def __init__(self, path: Path) -> None:
        # Written straight to the kernel, so that what was written survives whatever happens to this process.
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
        describe: Callable[[T], dict[str, Any]] = lambda _: {},
        **details: Any,
    ) -> T | None:
        """Perform the operation and record it; return None if it was refused or its outcome is unknown.

        `refused` are the errors which mean that certainly nothing was done. Any other error is raised.
        """
        number = self.begin(kind, key, **details)
        try:
            result = call()
        except refused as error:
            self.end(number, FAILED, error=_short(error))
            return None
        except unknown as error:
            self.end(number, UNKNOWN, error=_short(error))
            return None
        self.end(number, OK, **describe(result))
        return result

    def begin(self, kind: str, key: str, **details: Any) -> int:
        """Record the beginning of an operation and return its number."""
        number = next(self._numbers)
        self._write({"id": number, "at": time.monotonic(), "kind": kind, "key": key, "details": details})
        return number

    def end(self, number: int, outcome: str, **details: Any) -> None:
        """Record the end of an operation."""
        self._write({"id": number, "at": time.monotonic(), "outcome": outcome, "details": details})

    def record(self, kind: str, key: str, *, called: float | None = None, **details: Any) -> None:
        """Record an event that has already happened, since `called`."""
        at = time.monotonic() if called is None else called
        number = next(self._numbers)
        self._write({"id": number, "at": at, "kind": kind, "key": key, "details": details})
        self.end(number, OK)

    def _write(self, line: dict[str, Any]) -> None:
        # The child of a fork continues with the same number, so its records would look like its parent's.
        assert os.getpid() == self._process, "every process writes its own history"
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


class History:
    """All operations of one run, in the order in which they began."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        self.operations = sorted(operations, key=lambda one: one.called)

    @classmethod
    def read(cls, folder: Path) -> History:
        """Merge the histories that the processes of a run have written."""
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
        """The strikes against the processes, the network and the server."""
        return self.of("fault")

    @property
    def clock_was_set(self) -> bool:
        """Whether the server's clock was set, so that its times tell nothing about the order of events."""
        return any(one.key.startswith("clock") for one in self.faults)

    @property
    def state_was_lost(self) -> bool:
        """Whether the database may have forgotten what it acknowledged, as a standby that lagged behind does."""
        return any(one.details.get("loses_state") for one in self.faults)


def _read(path: Path) -> Iterator[Operation]:
    begun: dict[int, dict[str, Any]] = {}
    for text in path.read_bytes().split(b"\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue  # an empty line, or one that a killed process wrote in part
        if "kind" in line:
            begun[line["id"]] = line
        else:
            yield _operation(path.stem, begun.pop(line["id"]), line)
    for line in begun.values():
        yield _operation(path.stem, line, {"at": math.inf, "outcome": UNKNOWN, "details": {}})


def _operation(process: str, begin: dict[str, Any], end: dict[str, Any]) -> Operation:
    returned = math.inf if end["outcome"] == UNKNOWN else end["at"]
    return Operation(
        process, begin["kind"], begin["key"], begin["at"], returned, end["outcome"], begin["details"] | end["details"]
    )


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
