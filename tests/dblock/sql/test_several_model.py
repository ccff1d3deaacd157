"""Requests for all and for any of several locks against a plain model: who holds what, and who waits where."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from typing import NamedTuple

import psycopg
import pytest

NAMES = "abcd"
CALLERS = 5
CLIENT = uuid.UUID(int=0xC1)


class Step(NamedTuple):
    """What one caller does next."""

    verb: str
    caller: int
    names: tuple[str, ...]


VERBS = ["try all", "all", "all", "try any", "any", "any", "abandon", "release", "release"]


def random_steps(seed: int) -> list[Step]:
    """Return the steps of a seed."""
    choose = random.Random(seed)
    return [
        Step(
            choose.choice(VERBS), choose.randrange(CALLERS), tuple(choose.sample(NAMES, choose.randint(1, len(NAMES))))
        )
        for _ in range(30)
    ]


class Model:
    """The locks as they should be: the holder of each, and its queue."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.queues: dict[str, list[int]] = {name: [] for name in NAMES}

    def grant(self, name: str, caller: int) -> bool:
        """Grant a lock to a caller if it holds the lock already, or if it is the caller's turn."""
        queue = self.queues[name]
        if self.held.get(name, caller) != caller or (name not in self.held and queue and queue[0] != caller):
            return False
        self.held[name] = caller
        if caller in queue:
            queue.remove(caller)
        return True

    def queue(self, name: str, caller: int) -> None:
        """Let a caller wait for a lock, unless it does."""
        if caller not in self.queues[name]:
            self.queues[name].append(caller)

    def all(self, names: Sequence[str], caller: int, waits: bool) -> int:
        """Grant all the locks, as far as possible; return how many."""
        for number, name in enumerate(names):
            if not self.grant(name, caller):
                if waits:
                    self.queue(name, caller)
                return number
        return len(names)

    def try_all(self, names: Sequence[str], caller: int) -> int:
        """Grant all the locks or none; return how many."""
        before = dict(self.held)
        free = all(before.get(name, caller) == caller and (name in before or not self.queues[name]) for name in names)
        return self.all(names, caller, False) if free else 0

    def any(self, names: Sequence[str], caller: int, waits: bool) -> str | None:
        """Grant one of the locks; return which."""
        own = [name for name in names if self.held.get(name) == caller]
        waited = any(caller in self.queues[name] for name in names)
        for name in own or names:
            if (own or waited or not self.queues[name]) and (waits or not waited) and self.grant(name, caller):
                for queue in self.queues.values():
                    if caller in queue:
                        queue.remove(caller)
                return name
        if waits:
            for name in names:
                self.queue(name, caller)
        return None

    def abandon(self, caller: int) -> None:
        """Take everything from a caller."""
        self.held = {name: one for name, one in self.held.items() if one != caller}
        for queue in self.queues.values():
            if caller in queue:
                queue.remove(caller)


def play(owner: psycopg.Connection, steps: Sequence[Step]) -> None:
    """Play the steps in the database and in the model, and compare both after each."""
    owner.execute("DELETE FROM distributed_locks; DELETE FROM lock_tickets; DELETE FROM lock_queues")
    model = Model()
    asked: dict[int, Step] = {}
    for step in steps:
        caller = step.caller
        attempt = uuid.UUID(int=((caller + 1) << 64) + 1)
        if step.verb == "release":
            for name in step.names[:1]:
                owner.execute("SELECT release(name, token, false) FROM distributed_locks WHERE name = %s", [name])
                model.held.pop(name, None)
        elif step.verb == "abandon" or caller in asked:
            if step.verb != "abandon" and asked[caller].verb != "done":
                again(owner, model, asked[caller], attempt)
            else:
                owner.execute("SELECT abandon_all(%s, %s)", [list(NAMES), attempt])
                model.abandon(caller)
                asked.pop(caller, None)
        else:
            asked[caller] = step
            again(owner, model, step, attempt)
        compare(owner, model, step)


def again(owner: psycopg.Connection, model: Model, step: Step, attempt: uuid.UUID) -> None:
    """Send the request of a caller, for the first time or again."""
    client = None if step.verb.startswith("try") else CLIENT
    if step.verb.endswith("all"):
        names = sorted(step.names)
        call = "SELECT cardinality(tokens), refused FROM acquire_all(%s, attempt => %s, client => %s)"
        row = owner.execute(call, [names, attempt, client]).fetchone()
        count = model.all(names, step.caller, True) if client else model.try_all(names, step.caller)
        assert row is not None
        assert row[0] == count, step
        assert (row[1] is None) == (count == len(names)), step
    else:
        waited = any(step.caller in queue for queue in model.queues.values())
        call = "SELECT name FROM acquire_any(%s, attempt => %s, client => %s, had_tickets => %s)"
        row = owner.execute(call, [list(step.names), attempt, client, waited]).fetchone()
        assert row == (model.any(step.names, step.caller, client is not None),), step


def compare(owner: psycopg.Connection, model: Model, step: Step) -> None:
    rows = owner.execute("SELECT name, attempt FROM distributed_locks WHERE expires_at > clock_timestamp()").fetchall()
    assert {name: (attempt.int >> 64) - 1 for name, attempt in rows} == model.held, step
    queues: dict[str, list[int]] = {name: [] for name in NAMES}
    for name, attempt in owner.execute("SELECT name, attempt FROM lock_tickets ORDER BY name, number"):
        queues[name].append((attempt.int >> 64) - 1)
    assert queues == model.queues, step


@pytest.mark.second_stage
def test_requests_agree_with_the_model(owner: psycopg.Connection) -> None:
    for seed in range(40):
        play(owner, random_steps(seed))


@pytest.mark.nightly
def test_thousands_of_requests_agree_with_the_model(owner: psycopg.Connection) -> None:
    for seed in range(2_000):
        play(owner, random_steps(seed))
