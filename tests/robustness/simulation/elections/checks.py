"""What must hold in an election at every step, beside what holds for every lock.

The checks keep their own record of the beginnings and ends of terms. They do not rely on the log.

| check | what it finds |
|---|---|
| one leader | a candidate that leads although its term is not the open one, or two candidates that do |
| term order | a term that begins without its lock, under a lower token, out of number, or before the last one ended |
| term end | a term that ends twice, at an impossible moment, or whose recorded reason is not what happened |
| observer | an observer that missed a beginning or an end, or saw them twice or out of order |
"""

from __future__ import annotations

from dblock._core.lease_state import LeaseState
from dblock.recipes.elections.records import Leader, Vacancy
from dblock.testing.database.elections.store import election_lock
from dblock.testing.database.tables import Row, Term
from tests.robustness.simulation.checks import Checks, believes
from tests.robustness.simulation.client import Client
from tests.robustness.simulation.world import Violation

BY_THE_LEADER = ("resigned", "transferred", "outranked", "failed")
"""How a term ends whose leader ends it."""


class TermChecks(Checks):
    """Observes every step of an election, and raises a Violation."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.events: list[tuple[str, int]] = []
        """Every beginning and every end, in order."""
        self._open: Term | None = None
        self._last_end = 0.0
        self._last_token = 0
        self._began_at: dict[int, float] = {}
        self._ends: dict[int, str] = {}
        self._forced: set[int] = set()
        self._unknown: set[int] = set()
        """Terms that a server may have forgotten something about."""
        self._leaders: list[tuple[Client, LeaseState]] = []

    # What a candidate does.

    def leads(self, client: Client, state: LeaseState) -> None:
        """Record that a candidate leads. Before that it relies on nothing, and may have to yield."""
        self.holds(client, state)
        self._leaders.append((client, state))

    def each(self) -> None:
        """Check every trusted lease and every term that is believed, after every step."""
        super().each()
        if not self._leaders:
            return
        self._leaders = [
            one
            for one in self._leaders
            if not (one[0].dead or one[1].over or one[1].loss or one[0].clock() >= one[1].trusted_until)
        ]
        believed = [
            (client, state)
            for client, state in self._leaders
            if believes(client, state) and not self._is_excused(client, state)
        ]
        if len(believed) > 1:
            names = " and ".join(f"{client.name} under {state.token}" for client, state in believed)
            raise Violation("one leader", f"{names} lead at once")
        for client, state in believed:
            forgotten = self.database.promoted_at >= self._began_at[state.token]
            if not forgotten and (self._open is None or self._open.token != state.token):
                raise Violation("one leader", f"{client.name} leads under {state.token}, but the log has {self._open}")

    # What the database does.

    def began(self, term: Term) -> None:
        self.count("terms")
        held = self._held.get(election_lock(term.name))
        if held is None or held[0] != term.token or held[1] <= self.world.now:
            raise Violation("term order", f"{term.token} begins, but {held} holds the lock")
        if self._open is not None:
            raise Violation("term order", f"{term.token} begins, and {self._open.token} has not ended")
        if term.token <= self._last_token:
            raise Violation("term order", f"{term.token} begins after {self._last_token}")
        if term.began_at < self._last_end:
            raise Violation("term order", f"{term.token} begins at {term.began_at}, before {self._last_end}")
        self.events.append(("began", term.token))
        self._open, self._last_token, self._began_at[term.token] = term, term.token, self.world.now

    def ended(self, term: Term) -> None:
        self.count(f"terms {term.how}")
        if self._open is None or self._open.token != term.token:
            raise Violation("term end", f"{term.token} ends, but {self._open} was open")
        if term.ended_at is None or not term.began_at <= term.ended_at <= self.world.now:
            raise Violation("term end", f"{term} ends at an impossible moment")
        held = self._held.get(election_lock(term.name))
        if held is not None and held[0] == term.token and held[1] > self.world.now:
            raise Violation("term end", f"{term.token} ends, and still holds the lock until {held[1]}")
        if term.token not in self._unknown:
            self._check_reason(term)
        if ("ended", term.token) not in self.events:
            self.events.append(("ended", term.token))
        self._open, self._last_end = None, term.ended_at

    def _check_reason(self, term: Term) -> None:
        really = self._ends.get(term.token, "expired")
        was_forced = term.token in self._forced
        possible = {
            "released": {"forced"} if was_forced else {*BY_THE_LEADER, "released"},
            "abandoned": {"forced" if was_forced else "released"},
            "forced_now": {"forced"},
            "died": {"died"},
            "expired": {"expired"},
        }
        if term.how not in possible[really]:
            raise Violation("term end", f"the lease of {term.token} {really}, but the log says {term.how}")

    def freed(self, row: Row, why: str, by: int | str | None) -> None:
        super().freed(row, why, by)
        self._ends[row.token] = why
        if row.forced_at is not None:
            self._forced.add(row.token)

    def database_replaced(self) -> None:
        """Record that the database has forgotten something, and its state now."""
        super().database_replaced()
        log = [term for terms in self.database.store.tables.terms.values() for term in terms]
        self._unknown = {token for _, token in self.events}
        self._open = next((term for term in log if term.ended_at is None), None)
        self._last_token = max((term.token for term in log), default=0)
        self._last_end = max((term.ended_at for term in log if term.ended_at is not None), default=0.0)

    # What observers saw.

    def observed(self, name: str, since: int | None, seen: list[Leader | Vacancy]) -> None:
        """Check what an observer has seen in the whole run."""
        self.count("observers")
        events = [("began" if isinstance(event, Leader) else "ended", event.token) for event in seen]
        expected = self.events
        if self.database.promoted_at >= 0:
            tokens = [token for _, token in events]
            if tokens != sorted(tokens) or len(set(events)) < len(events):
                raise Violation("observer", f"{name} saw {events}")
            return
        if since is None:
            expected = expected[expected.index(events[0]) :] if events and events[0] in expected else []
        if events != expected:
            raise Violation("observer", f"{name} saw {events}, and these happened: {expected}")
