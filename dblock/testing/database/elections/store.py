"""The database in memory: the meaning of the SQL functions of elections.

Written after dblock/sql/elections, function by function and under the same names. What the functions check of their
arguments is left out, and so are the limits of what is kept: no run here has ten thousand terms or lasts for a day.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from dblock.testing.database.store import Store
from dblock.testing.database.tables import Candidate, Term


class TermObserver(Protocol):
    """Learns of every beginning and every end of a term, at the moment of the change."""

    def began(self, term: Term) -> None: ...

    def ended(self, term: Term) -> None: ...


class Ignored:
    """An observer that checks nothing."""

    def began(self, term: Term) -> None: ...

    def ended(self, term: Term) -> None: ...


class Leader(NamedTuple):
    """The reply of election_leader."""

    token: int | None
    holder: str | None
    value: str | None
    began_at: float | None
    doubt: float | None


def election_lock(name: str) -> str:
    """Return the name of the lock of an election."""
    return f"election:{name}"


class Elections:
    """The elections in one database."""

    def __init__(self, store: Store, observer: TermObserver | None = None) -> None:
        self._store = store
        self.observer: TermObserver = observer or Ignored()

    def log(self, name: str) -> list[Term]:
        """Return the terms of an election, in the order of their numbers."""
        return self._store.tables.terms.setdefault(name, [])

    def candidates(self, name: str) -> dict[str, Candidate]:
        """Return the candidates of an election, by their attempts."""
        return self._store.tables.candidates.setdefault(name, {})

    def live_candidates(self, name: str) -> list[Candidate]:
        store, found = self._store, []
        for ticket in list(store.tables.tickets.get(election_lock(name), ())):
            candidate = self.candidates(name).get(ticket.attempt)
            present = ticket.presence is None or store.remaining_grace(ticket.presence) is None
            heard = store.tables.clients.get(ticket.client, float("-inf")) > store.now()
            if candidate is not None and heard and present:
                found.append(candidate)
        return found

    def end(self, term: Term, at: float, how: str) -> None:
        """Record the end of a term."""
        term.ended_at, term.how = at, how
        self.observer.ended(term)

    def end_terms_below(self, name: str, below: int) -> None:
        store, now = self._store, self._store.now()
        row = store.tables.rows.get(election_lock(name))
        for term in self.log(name):
            if term.token >= below or term.ended_at is not None:
                continue
            event, at = store.tables.history.get((election_lock(name), term.token), (None, None))
            if event in (None, "forced"):
                freed_at = None if row is None else row.released_at if row.token == term.token else row.granted_at
                at = None if freed_at == float("-inf") else freed_at
            how = "forced" if event == "forced_now" else event or "released"
            self.end(term, min(now if at is None else at, now), how)

    def record_ended_term(self, name: str) -> float | None:
        store, now = self._store, self._store.now()
        opened = [term for term in self.log(name) if term.ended_at is None]
        if not opened:
            return None
        term = opened[-1]
        row = store.tables.rows.get(election_lock(name))
        if row is not None and row.token == term.token and row.expires_at > now:
            grace = None if row.presence is None else store.remaining_grace(row.presence)
            if grace is None or grace > 0:
                return grace
            store.free(row, "died", row.presence)
            self.end_terms_below(name, term.token + 1)
            store.wake_if_free(row.name)
        elif row is not None and row.token == term.token and row.expires_at > float("-inf"):
            self.end(term, min(row.expires_at, now), "expired")
        else:
            self.end_terms_below(name, term.token + 1)
        return None

    # What a client calls.

    def join_election(self, name: str, attempt: str, holder: str, rank: tuple[int, ...]) -> None:
        self.candidates(name)[attempt] = Candidate(attempt, holder, rank)

    def leave_election(self, name: str, attempt: str) -> bool:
        return self.candidates(name).pop(attempt, None) is not None

    def begin_term(self, name: str, token: int, attempt: str | None, value: str | None) -> str:
        store, log = self._store, self.log(name)
        if not self.holds(name, token):
            return "lost"
        last = log[-1] if log else None
        if last is not None and last.token == token:
            store.durable = True
            return "lead" if last.ended_at is None else "lost"
        holder = store.tables.rows[election_lock(name)].holder
        own = self.candidates(name).get(attempt or "")
        rank = own.rank if own is not None else ()
        named = None if last is None else last.transfer_to
        if named is None or named != holder:
            for other in self.live_candidates(name):
                if other.holder == named or other.rank > rank:
                    store.release(election_lock(name), token)
                    self.candidates(name).pop(attempt or "", None)
                    return "yield"
        store.durable = True
        self.end_terms_below(name, token)
        term = Term(name, token, last.number + 1 if last else 1, holder, rank, value, store.now())
        log.append(term)
        self.observer.began(term)
        self.candidates(name).pop(attempt or "", None)
        return "lead"

    def holds(self, name: str, token: int) -> bool:
        """Return whether this grant holds the lock of an election, as assert_held does."""
        row = self._store.tables.rows.get(election_lock(name))
        return row is not None and row.token == token and row.expires_at > self._store.now()

    def end_term(self, name: str, token: int, how: str) -> bool:
        store = self._store
        row = store.tables.rows.get(election_lock(name))
        was_forced = row is not None and row.token == token and row.forced_at is not None
        if not store.release(election_lock(name), token):
            self.record_ended_term(name)
            return False
        for term in self.log(name):
            if term.token == token and term.ended_at is None:
                self.end(term, store.now(), "forced" if was_forced else how)
        return True

    def publish_value(self, name: str, token: int, value: str | None) -> bool:
        for term in self.log(name):
            if term.token == token and term.ended_at is None and self.holds(name, token):
                term.value = value
                self._store.durable = True
                return True
        return False

    def transfer_term(self, name: str, token: int, candidate: str) -> str:
        term = next((term for term in self.log(name) if term.token == token and term.ended_at is None), None)
        if term is None or not self.holds(name, token):
            return "over"
        live = self.live_candidates(name)
        named = max((one.rank for one in live if one.holder == candidate), default=None)
        if named is None:
            return "leads" if term.holder == candidate else "absent"
        if named < term.rank or any(one.rank > named for one in live):
            return "outranked"
        term.transfer_to = candidate
        self._store.durable = True
        return "asked"

    def term_demand(self, name: str, token: int) -> str | None:
        term = next((term for term in self.log(name) if term.token == token), None)
        if term is None or term.ended_at is not None:
            return "over"
        if term.transfer_to is not None:
            return "transfer"
        registered = any(one.rank > term.rank for one in self.candidates(name).values())
        if registered and any(one.rank > term.rank for one in self.live_candidates(name)):
            return "priority"
        return None

    def election_leader(self, name: str) -> Leader:
        doubt = self.record_ended_term(name)
        for term in self.log(name):
            if term.ended_at is None and self.holds(name, term.token):
                return Leader(term.token, term.holder, term.value, term.began_at, doubt)
        return Leader(None, None, None, None, doubt)

    def list_terms(self, name: str, since: int | None, ended: bool, most: int) -> tuple[list[dict[str, Any]], bool]:
        """Return the rows of some terms, and whether terms before them are forgotten."""
        self.record_ended_term(name)
        log = self.log(name)
        if since is None:
            found = log[-1:]
        else:
            found = [
                term
                for term in log
                if term.token > since or (term.token == since and term.ended_at is not None and not ended)
            ]
        forgotten = bool(log) and since is not None and log[0].number > 1 and log[0].token > since
        return [_shown(term) for term in found[:most]], forgotten


def _shown(term: Term) -> dict[str, Any]:
    names = ("token", "holder", "value", "began_at", "ended_at", "how")
    return {name: getattr(term, name) for name in names}
