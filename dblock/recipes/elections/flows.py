"""The calls of an election, and the steps of a campaign and of an observer, as flows for threads and asyncio.

Every call names the exact term by its token, or the exact candidate by its attempt, so it is safe to send twice.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

from dblock._core.acquire import LockFlows
from dblock._core.effects import Call, Flow, Sleep
from dblock._core.options import Seconds, check_timeout, encode_meta, quoted
from dblock._core.outage import Outage
from dblock._core.replies import array, decoded, moment
from dblock.errors import (
    AccessDenied,
    DatabaseError,
    DblockError,
    InvalidArgument,
    LoginRefused,
    SchemaError,
    TermsForgotten,
    TransferRefused,
    UnsuitableServer,
)
from dblock.recipes.elections.records import PREFIX, STEPPED_BACK, ElectionOptions, Leader, Vacancy, events

MOST_TERMS = 1000
"""How many terms one call returns at most."""

HOPELESS = (AccessDenied, LoginRefused, SchemaError, UnsuitableServer)
"""Errors of the database that an observer reports at once, because waiting does not help."""


class Acquire(NamedTuple):
    """Wait for the lock under this attempt. The result is a lease; a timeout raises LockTimeout."""

    attempt: str
    timeout: float | None
    """Seconds that are left."""
    limit: float | None
    """Seconds that the caller gave, for the LockTimeout."""


class Abandon(NamedTuple):
    """Give back a lease that has led nothing, without waiting for the database."""

    lease: Any


class Position:
    """How far an observer has read the log."""

    def __init__(self, since: int | Leader | Vacancy | None) -> None:
        if isinstance(since, bool) or not isinstance(since, (int, Leader, Vacancy, type(None))):
            raise InvalidArgument(f"An observer starts since a token, a Leader, a Vacancy or None; got {since!r}.")
        self.token = since.token if isinstance(since, (Leader, Vacancy)) else since
        self.is_open = not isinstance(since, Vacancy)
        """Whether the end of that term is still to be seen."""

    def passed(self, seen: Leader | Vacancy) -> None:
        """Move past an event."""
        self.token, self.is_open = seen.token, isinstance(seen, Leader)


class ElectionFlows:
    """The flows of one candidate or observer."""

    def __init__(self, flows: LockFlows, schema: str, options: ElectionOptions) -> None:
        self._flows = flows
        self._name = options.name
        self._options = options
        prefix = quoted(schema)
        self._join = f"SELECT {prefix}.join_election($1, $2, $3, $4)".encode()
        self._leave = f"SELECT {prefix}.leave_election($1, $2)".encode()
        self._begin = f"SELECT {prefix}.begin_term($1, $2, $3, $4)".encode()
        self._end = f"SELECT {prefix}.end_term($1, $2, $3)".encode()
        # A retry that finds nothing to release returns NULL, because the first call may have released it.
        self._end_again = f"SELECT nullif({prefix}.end_term($1, $2, $3), false)".encode()
        self._publish = f"SELECT {prefix}.publish_value($1, $2, $3)".encode()
        self._transfer = f"SELECT {prefix}.transfer_term($1, $2, $3)".encode()
        self._demand = f"SELECT {prefix}.term_demand($1, $2)".encode()
        self._leader = (
            f"SELECT token, holder, value, date_part('epoch', began_at), doubt FROM {prefix}.election_leader($1)"
        ).encode()
        self._terms = f"SELECT terms, forgotten FROM {prefix}.list_terms($1, $2, $3, $4)".encode()

    def campaign(self, timeout: Seconds | None, stepped_back: bool = False) -> Flow[Any]:
        """Wait until this candidate leads. The result is the lease of its term."""
        seconds = check_timeout(PREFIX + self._name, timeout)
        flows = self._flows
        give_up_at = math.inf if seconds is None else flows.clock() + seconds
        rank = STEPPED_BACK if stepped_back else self._options.rank
        while True:
            attempt = flows.new_name()
            lease: Any = None
            left = None if seconds is None else max(give_up_at - flows.clock(), 0.0)
            try:
                holder = flows.holder_name()
                yield Call(self._join, (self._name, attempt, holder, array(map(str, rank))))
                lease = yield Acquire(attempt, left, seconds)
                args = (self._name, str(lease.token), attempt, self._options.value)
                (decision,) = yield Call(self._begin, args)
            except BaseException:
                if lease is not None:
                    yield Abandon(lease)
                with contextlib.suppress(DblockError):
                    yield Call(self._leave, (self._name, attempt), within=flows.timings.give_up_within)
                raise
            if decision == "lead" and lease.remaining():
                return lease
            # Another candidate comes first, or the lease ended before the term could begin.
            yield Abandon(lease)

    def end(self, token: int, how: str, trusted_until: float) -> Flow[bool]:
        """End a term and release its lock. The result is False when the lease was lost before."""
        (released,) = yield Call(self._end, (self._name, str(token), how), self._end_again)
        if released is None:
            # The first reply was lost. While the trust window is open, only the first call can have ended the term.
            return self._flows.clock() < trusted_until
        return bool(released == "t")

    def publish(self, token: int, value: Any) -> Flow[bool]:
        """Replace the value of a term. The result is False when the token does not lead."""
        (done,) = yield Call(
            self._publish, (self._name, str(token), encode_meta(self._name, value, "value of election"))
        )
        return bool(done == "t")

    def demand(self, token: int) -> Flow[str | None]:
        """Ask why a term should end."""
        (why,) = yield Call(self._demand, (self._name, str(token)))
        found: str | None = why
        return found

    def transfer(self, candidate: str) -> Flow[int]:
        """Ask the present leader to hand over to a candidate. The result is the token of the term that ends."""
        leader = yield from self.leader()
        why = "over"
        if leader is not None:
            (why,) = yield Call(self._transfer, (self._name, str(leader.token), candidate))
        if leader is None or why != "asked":
            raise TransferRefused(self._name, candidate, why)
        return int(leader.token)

    def leader(self) -> Flow[Leader | None]:
        """Ask for the leader. If its session has just ended, wait until that is certain."""
        while True:
            token, holder, value, began_at, doubt = yield Call(self._leader, (self._name,))
            if doubt is None:
                break
            yield Sleep(float(doubt) + 0.01)
        if token is None:
            return None
        return Leader(self._name, int(token), holder, decoded(value), moment(float(began_at)))

    def next_events(self, position: Position, timeout: float | None) -> Flow[list[Leader | Vacancy]]:
        """Wait for the next events after this position. The result is empty when the timeout has passed."""
        flows = self._flows
        give_up_at = math.inf if timeout is None else flows.clock() + timeout
        outage = Outage(f"observer: the log of election {self._name!r} can be read again")
        interval = flows.timings.observe_interval
        pause = interval
        while True:
            problem: DatabaseError | None = None
            wait = interval
            since = None if position.token is None else str(position.token)
            args = (self._name, since, "f" if position.is_open else "t", str(MOST_TERMS))
            try:
                terms, forgotten = yield Call(self._terms, args)
            except HOPELESS:
                raise
            except DatabaseError as error:
                problem = error
                outage.failed("observer: the log of election %r cannot be read, retrying: %s", self._name, error)
                wait = flows.uniform(pause / 2, pause)
                pause = min(pause * 2, flows.timings.longest_election_pause)
            else:
                outage.worked()
                pause = interval
                if forgotten == "t":
                    raise TermsForgotten(self._name, position.token or 0)
                found = events(self._name, terms, position.token, position.is_open)
                if position.token is None and not found:
                    position.token = 0
                if found:
                    return found
            left = give_up_at - flows.clock()
            if left <= 0 and problem is not None:
                raise problem
            if left <= 0:
                return []
            yield Sleep(min(wait, left))


class EndsTerm:
    """Takes the place of the client's flows for the lease of a term, whose release also ends the term."""

    def __init__(self, service: LockFlows, election: ElectionFlows) -> None:
        self.renew = service.renew
        self.observation = service.observation
        self.how = "resigned"
        """How the term ends if it is released."""
        self._election = election

    def release(self, name: str, token: int, trusted_until: float) -> Flow[bool]:
        """End this term and release its lock."""
        return self._election.end(token, self.how, trusted_until)
