"""One run of a proof: the first holder behind a gate that freezes it, and the second holder."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dblock.errors import DblockError
from dblock.observability import ObservedHold
from dblock.testing.client_clock import ClientClock, past_ttl
from dblock.testing.leaks import Watch
from dblock.testing.proof.gate import Gate
from dblock.testing.proof.holder import Holder
from dblock.testing.proof.tables import Rows, difference, values

if TYPE_CHECKING:
    from dblock.testing.proof.proving import Proof

POLL = 0.005

ENDS_WITHIN = 1.0
"""Seconds in which a holder ends after its connections were cut."""

SAME_VALUES = "the first holder wrote the same values again, after the second one"


class BothHolders(Watch):
    """Watches the clients of both holders, and tells the grants of the first one apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Holder | None = None
        self.of_first: list[ObservedHold] = []
        """The leases that the first holder was granted."""
        self.at_grant: Callable[[], object] | None = None
        """Called at each grant of the first holder."""

    def hold_began(self, hold: ObservedHold) -> None:
        super().hold_began(hold)
        if self.first is not None and self.first.is_this_thread():
            self.of_first.append(hold)
            if self.at_grant is not None:
                self.at_grant()


class Run:
    """One run: the first holder behind its gate, and the second one."""

    def __init__(self, proof: Proof, watch: BothHolders, own: set[int]) -> None:
        self._proof = proof
        self._watch = watch
        self._first = Holder(proof.function, proof.schema, proof.lock, own)
        self._second = Holder(proof.function, proof.schema, proof.lock, own)
        watch.first = self._first
        self.gate = Gate(proof.dsn, proof.server, self._first.where, own)
        # It holds nothing back, and ends what the second holder does if the proof gives up.
        self._gate_of_second = Gate(proof.dsn, proof.server, lambda: None)
        self._since = proof.tables.now()
        self.foreign_tokens = proof.live_tokens()
        """The tokens of locks that this run did not acquire."""
        self._first_clients: list[Any] = []
        self._held = False
        """Whether the first holder had a lease when it was frozen."""
        self._grants = 0
        """How many of its leases the first holder has lost: those from before a moment at which it was frozen."""
        self._before_regained: Rows | None = None
        self._open_before_regained: list[str] = []
        self.error: BaseException | None = None
        """The error that the second holder has raised."""

    def start(self, freeze_at: int | None = None) -> bool:
        """Run the first holder up to a statement, or to its end; return whether it is frozen there."""
        if freeze_at is not None:
            self.gate.freeze_at(freeze_at)
        self._first.start(self.gate.dsn)
        until = time.monotonic() + self._proof.patience
        while self._first.running and not self.gate.frozen:
            self._check(until, "The function did not return, nor send its next statement")
            time.sleep(POLL)
        self._first_clients = [client for client, _ in self._watch.clients]
        self._grants = len(self._watch.of_first)
        self._held = bool(self._watch.holds)
        if self.gate.frozen:
            for its_clock in self._clocks():
                its_clock.stop()
            for client in self._first_clients:
                _withhold_news(client)
        return self.gate.frozen

    def _clocks(self) -> list[ClientClock]:
        clocks = [client._runtime.flows.clock for client in self._first_clients]
        return [one for one in clocks if isinstance(one, ClientClock)]

    def _pass_ttl(self) -> None:
        """Let every check of the first holder find its lease lost, as after a pause that was longer than its ttl."""
        stale = self._watch.of_first[: self._grants]
        for client in self._first_clients:
            for state, hold in list(client._runtime.flows.observation._holds.items()):
                if hold in stale:
                    state.use_clock(past_ttl)
        for its_clock in self._clocks():
            its_clock.resume()

    def end_first(self) -> None:
        """Let the first holder run to its end, with its lease lost."""
        self._pass_ttl()
        self.gate.resume()
        self._join(self._first, "The function did not return after it was resumed")

    def kill_first(self) -> None:
        """Let the first holder die where it is."""
        self._pass_ttl()
        self.gate.cut()
        self._join(self._first, "The function did not return after its connections were cut")
        until = time.monotonic() + self._proof.patience
        while self._proof.sessions(self.gate.backends()):
            self._check(until, "The sessions of the function did not end")
            time.sleep(POLL)

    def run_second(self) -> int:
        """Run the second holder to its end; return the number of the statement before which the first one is held."""
        self._proof.expire_except(self.foreign_tokens)
        self._second.start(self._gate_of_second.dsn)
        until = time.monotonic() + self._proof.patience
        while self._second.running:
            self._check(until, "The second holder did not return. Does the function wait for a lock that stays held?")
            if self.gate.frozen and self._proof.is_blocked(self.gate.backends()):
                self._pass_ttl()
                reached = len(self.gate.statements)
                self.gate.step()
                # Wait for its next statement, or its end. Then check again whether the second holder can continue.
                while len(self.gate.statements) == reached and self._first.running and self._second.running:
                    self._check(until, "The function did not return, nor send its next statement")
                    time.sleep(POLL)
            self._expire_new_grants()
            time.sleep(POLL)
        self._expire_new_grants()
        self._watch.at_grant = self._note_grant
        self.error = self._second.error
        return self.gate.reached

    def _expire_new_grants(self) -> None:
        """Let what the first holder was granted while it was let through expire too: it is frozen again."""
        if self.gate.frozen and len(self._watch.of_first) > self._grants:
            self._grants = len(self._watch.of_first)
            stale = [hold.token for hold in self._watch.of_first]
            self._proof.expire_except([token for token in self._proof.live_tokens() if token not in stale])
            self._pass_ttl()

    def _note_grant(self) -> None:
        if self._held and self._before_regained is None:
            self._before_regained = self._proof.tables.read()
            self._open_before_regained = self._proof.open_transactions(self.gate.backends())

    def harm_before_regained(self, between: Rows) -> str:
        """Return what the first holder did between the end of the second one and its own next grant."""
        if self._before_regained is None:
            return ""
        if self._before_regained != between:
            was, ends = self.values(between), self.values(self._before_regained)
            return difference(was, ends, ("the second holder left", "then the first one left")) or SAME_VALUES
        if self._proof.are_committed(self._open_before_regained):
            return "the first holder committed a transaction in which it wrote before it was granted a lock again"
        return ""

    def close(self) -> None:
        """End both holders."""
        for gate in (self.gate, self._gate_of_second):
            gate.close()
        for holder in (self._first, self._second):
            holder.join(ENDS_WITHIN)

    def first_error(self) -> BaseException | None:
        """Return the error that the first holder has raised, None if it has returned."""
        return self._first.error

    def regained(self) -> bool:
        """Return whether the first holder was granted a lock after the second one had returned."""
        return len(self._watch.of_first) > self._grants

    def values(self, rows: Rows) -> dict[str, list[str]]:
        """Return the rows without what differs from run to run."""
        tokens = [hold.token for hold, _ in self._watch.grants if hold.token is not None]
        return values(rows, tokens, self._since)

    def _join(self, holder: Holder, message: str) -> None:
        if not holder.join(self._proof.patience):
            raise DblockError(f"{message} within {self._proof.patience:g} s.")

    def _check(self, until: float, message: str) -> None:
        if time.monotonic() > until:
            raise DblockError(f"{message} within {self._proof.patience:g} s.")


def _withhold_news(client: Any) -> None:
    """Let the tasks of a client receive no news of a loss: no event, and no cancellation of a body."""
    callbacks: Any = getattr(client._runtime, "callbacks", None)
    if hasattr(callbacks, "in_loop"):
        callbacks.in_loop = lambda function: None
