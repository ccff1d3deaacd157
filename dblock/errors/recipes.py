"""The errors of migrations, elections, barriers and latches."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import ClassVar

from dblock.errors.base import DblockError


class MigrationFailed(DblockError):
    """A version of a migration has failed, here or on another replica. It is not run again."""

    def __init__(self, name: str, version: str | None, failures: int, error: str | None) -> None:
        self.name = name
        self.version = version
        self.failures = failures
        self.error = error
        """What the first of the failed runs reported."""
        to = "" if version is None else f" to version {version!r}"
        times = "once" if failures == 1 else f"{failures} times"
        said = f" It reported: {error}" if error else ""
        super().__init__(
            f"Migration {name!r}{to} has failed {times} and is not run again until you deploy another version, or run: "
            f"dblock migrate --name {shlex.quote(name)} --retry.{said}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.version, self.failures, self.error)


class MigrationBlocked(DblockError):
    """A migration could not lock a table in time, or deadlocked, as often as it may."""

    def __init__(self, name: str, problem: str, tries: int, blockers: Sequence[str]) -> None:
        self.name = name
        self.problem = problem
        self.tries = tries
        self.blockers = list(blockers)
        """The sessions that were seen to hold the locks, at most five, each in a line."""
        times = "once" if tries == 1 else f"{tries} times"
        by = f" It was blocked by {'; '.join(self.blockers)}." if self.blockers else ""
        super().__init__(
            f"Migration {name!r} {problem}, {times}, and was rolled back.{by} End these sessions, or migrate when they "
            "are gone."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.problem, self.tries, self.blockers)


class DatabaseAhead(DblockError):
    """The database is at a newer version than the caller."""

    def __init__(self, name: str, version: str, newer: str) -> None:
        self.name = name
        self.version = version
        self.newer = newer
        super().__init__(
            f"Migration {name!r}: the database is at {newer!r}, which is newer than {version!r}. Deploy the newer "
            "code, or accept a database that is ahead: --when-ahead ok, or when_ahead='ok'."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.version, self.newer)


class SessionsRemain(DblockError):
    """Sessions of an earlier migration could not be ended, so nothing was run."""

    def __init__(self, name: str, pids: Sequence[int]) -> None:
        self.name = name
        self.pids = list(pids)
        listed = ", ".join(map(str, self.pids))
        super().__init__(
            f"Migration {name!r} was not started: sessions of an earlier holder still run (pid {listed}) and did not "
            "end when they were terminated. End them as their role or as a superuser: SELECT pg_terminate_backend(pid)."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.pids)


class TransferRefused(DblockError):
    """A term of an election was not handed over, because the named candidate cannot lead next."""

    _WHY: ClassVar[dict[str, str]] = {
        "absent": "no candidate of that name waits. Name one that campaigns at this moment",
        "outranked": "the leader or another candidate has a higher priority or version, and would take over at once. "
        "Name one with the highest priority",
        "leads": "it is the leader already",
        "over": "there is no leader. Ask again when a term has begun",
    }

    def __init__(self, name: str, candidate: str, why: str) -> None:
        self.name = name
        self.candidate = candidate
        self.why = why
        """One of absent, outranked, leads and over."""
        super().__init__(
            f"Election {name!r} was not transferred to candidate {candidate!r}: {self._WHY.get(why, why)}."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.candidate, self.why)


class TermsForgotten(DblockError):
    """An observer of an election asks for terms that are not kept any more."""

    def __init__(self, name: str, since: int) -> None:
        self.name = name
        self.since = since
        super().__init__(
            f"Election {name!r} does not keep all terms since token {since} any more: only the newest ten thousand are "
            "kept. Call leader(), and observe from there."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.name, self.since)


class WaitTimeout(DblockError, TimeoutError):
    """A barrier did not trip, or a latch did not open, before the timeout passed."""

    def __init__(self, kind: str, name: str, timeout: float) -> None:
        self.kind = kind
        """One of barrier and latch."""
        self.name = name
        self.timeout = timeout
        what = (
            "did not trip within {:g} s: not all parties were there at once. This party has left it."
            if kind == "barrier"
            else "did not open within {:g} s: it was not counted down to 0."
        )
        super().__init__(
            f"{kind.capitalize()} {name!r} {what.format(timeout)} Wait longer, or see what is missing with: "
            "dblock barriers"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.kind, self.name, self.timeout)


class CountsDiffer(DblockError):
    """A client gives another number of parties for a barrier, or another count for a latch, than the first one gave."""

    def __init__(self, kind: str, name: str, count: int, asked: int) -> None:
        self.kind = kind
        """One of barrier and latch."""
        self.name = name
        self.count = count
        """The number that the barrier or latch has."""
        self.asked = asked
        """The number that this client gave."""
        has = f"{count} parties" if kind == "barrier" else f"a count of {count}"
        super().__init__(
            f"{kind.capitalize()} {name!r} has {has}, and this client gave {asked}. Give the same number everywhere, "
            f"or delete it first: dblock barriers delete {kind} {shlex.quote(name)}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.kind, self.name, self.count, self.asked)
