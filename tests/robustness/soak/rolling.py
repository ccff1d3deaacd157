"""Run checkers on the most recent part of the history while a soak continues.

The history of hours is too long to keep, so it comes in windows. The checkers read two windows at a time, and from
before them the newest grant of each lock. What they look for shows between neighbours in time: a token below an earlier
one, or a holder that believes in its lease although the lock has been granted again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from tests.robustness.checkers import loss, token_order
from tests.robustness.history.record import UNKNOWN, History, Operation, _operation


class Windows:
    """Assemble operations from the reports of the processes, and check them."""

    def __init__(self) -> None:
        self._begun: dict[str, dict[int, dict[str, Any]]] = {}
        self._arrived: list[Operation] = []
        self._last: list[Operation] = []
        self._newest: dict[str, Operation] = {}
        """The grant with the highest token of each lock, among those that are in no window any more."""
        self.violations: dict[str, None] = {}
        self.checked = {"token order": 0, "loss reported first": 0}

    def report(self, process: str, lines: list[dict[str, Any]]) -> None:
        """Add the lines that a process reports."""
        begun = self._begun.setdefault(process, {})
        for line in lines:
            if "kind" in line:
                begun[line["id"]] = line
            else:
                self._arrived.append(_operation(process, begun.pop(line["id"]), line))

    def forget(self, process: str) -> None:
        """Forget a dead process and its unfinished operations, whose outcome stays unknown."""
        self._begun.pop(process, None)

    def next(self) -> list[Operation]:
        """Check what has arrived together with the previous window, and return it."""
        window, self._arrived = self._arrived, []
        # Lock by lock, so that the time grows with the operations and not with the locks as well.
        by_key: dict[str, list[Operation]] = defaultdict(list)
        for one in (*self._last, *window):
            by_key[one.key].append(one)
        for key, operations in by_key.items():
            known = [self._newest[key]] if key in self._newest else []
            history = History([*known, *operations])
            for check in (token_order.check, loss.check):
                self.violations.update(dict.fromkeys(check(history).violations))
        tokens = Counter(one.token for one in (*self._last, *window) if one.kind == "acquire" and one.ok)
        self.violations.update({f"token {token} was granted twice": None for token in tokens if tokens[token] > 1})
        self.checked["token order"] += sum(one.kind == "acquire" and one.ok for one in window)
        self.checked["loss reported first"] += sum(one.kind == "believe" for one in window)
        for one in self._last:
            if one.kind == "acquire" and one.ok:
                newest = self._newest.get(one.key)
                if newest is None or newest.token < one.token:
                    self._newest[one.key] = one
        if len(self._newest) > MOST_REMEMBERED:
            # Locks that were used once and never again: the oldest can be dropped.
            oldest = sorted(self._newest.values(), key=lambda one: one.returned)[: MOST_REMEMBERED // 2]
            for one in oldest:
                del self._newest[one.key]
        self._last = [one for one in window if one.outcome != UNKNOWN]
        return window


MOST_REMEMBERED = 20_000
"""Most locks whose newest grant is kept."""
