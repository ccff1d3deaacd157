"""The story: who gets which cue, and when. It goes on by what has happened, not by the clock.

A cue follows what has been seen: that a worker stands in line, that its process has stopped, what its lease says. The
pauses in between are there for those who read along; however long they come to be, the story is the same. What must
come true is checked against the ledger and the tokens, and the story fails where it does not.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from dblock._runtime.target import Target
from dblock.cli.demo.cast import Worker
from dblock.cli.demo.events import Event, Say
from dblock.cli.demo.ledger import Ledger, made
from dblock.client import Client
from dblock.errors import DblockError

TTL = 1.8
PAUSE = 0.25
"""Seconds between cues, to be able to read along, and to see them apart in a picture."""
PATIENCE = 30.0
"""Seconds after which something that must happen is not waited for any longer."""

PROLOGUE = "Prologue: one lock, handed over"
WITHOUT = "Act one: without a fence"
WITH = "Act two: with the fence"


def tell_story(target: Target, schema: str, say: Say) -> list[Event]:
    """Let two workers contend for a lock and keep a ledger under it; say each thing when it has happened."""
    number = secrets.token_hex(3)
    with (
        made(target, f"dblock_demo_{number}") as ledger,
        Client(target.conninfo(), schema=schema, holder="conductor", presence=None) as client,
        ExitStack() as ended,
    ):
        arguments = (schema, f"dblock_demo_{number}", f"demo:ledger:{number}", str(TTL))

        def enter(name: str) -> Worker:
            return ended.enter_context(Worker(name, target.conninfo(), *arguments))

        story = Story(enter, client, f"demo:ledger:{number}", ledger, say)
        story.prologue()
        story.lose_a_deposit()
        story.refuse_a_stale_write()
        story.count_tokens()
        return story.events


class Story:
    """The story as it is told."""

    def __init__(self, enter: Callable[[str], Worker], client: Client, lock: str, ledger: Ledger, say: Say) -> None:
        self._enter = enter
        self._lock = client.lock(lock)
        self._ledger = ledger
        self._say = say
        self._began = 0.0
        self._act = ""
        self.events: list[Event] = []
        self._alice, self._bob = enter("alice"), enter("bob")

    def prologue(self) -> None:
        """Hand the lock over; kill its holder, and see who has it next, and how soon."""
        alice, bob = self._alice, self._bob
        for worker in (alice, bob):
            self._hear(worker)
        self._began = time.monotonic()
        self._begin(PROLOGUE)
        for worker in (alice, bob):
            self._meet(worker, "is here")
        self._acquire(alice, f"holds {self._lock.name!r} under token {{token}}, for {TTL:g} s unless renewed")
        tried = self._ask(bob, "try_once")
        self._note(bob, "tried", f"tries, and is told that {tried['holder']} has it", tried)
        self._line_up(bob, "waits for it in line")
        self._pause()
        self._note(alice, "renewed", f"renews: the {TTL:g} s start anew", self._ask(alice, "renew"))
        self._pause()
        released = self._release(alice, "releases it")
        self._granted(bob, "holds it under token {token}, {after:.0f} ms after the release", released)
        self._line_up(alice, "wants it back, and waits")
        self._pause()
        holder, asked = self._lock.holder(), time.monotonic()
        if holder is None or holder.holder != "bob":
            raise DblockError("bob has lost his lease before he was killed: the machine is too busy for a story.")
        killed = bob.kill()
        self._note(bob, "killed", "is killed with kill -9, holding the lock", {"at": killed})
        would_end = asked + holder.remaining
        self._bob = self._enter("bob")
        granted = self._granted(alice, "", killed)
        left = would_end - granted["at"]
        soon = f"with {left:.1f} s of his lease left" if left > 0 else "when his lease had run out"
        after = (granted["at"] - killed) * 1000
        self._note(
            alice, "held", f"holds it under token {granted['token']}, {after:.0f} ms after the kill, {soon}", granted
        )
        self._pause()
        self._release(alice, "releases it")

    def lose_a_deposit(self) -> None:
        """Freeze a holder between its reading and its writing; its write undoes another's deposit."""
        self._begin(WITHOUT)
        self._hear(self._bob)
        self._meet(self._bob, "is back")
        late = self._freeze_and_overtake("plain")
        books = self._ledger.books(WITHOUT)
        gone = books.due - books.balance
        if late["refused_for"] is not None or not gone:
            raise DblockError(
                f"Act one did not come true: after alice's late write the balance is {books.balance}, and the "
                f"deposits say {books.due}. This is a bug; please report it."
            )
        self._note(
            self._alice, "corrupted", f"writes {late['amount']}, as if nothing had happened: stored", late,
            amount=late["amount"],
        )  # fmt: skip
        self._learn_of_the_loss()
        said = f"should be {books.sum}, is {books.balance}: {gone} {'are' if gone > 1 else 'is'} gone"
        self._sums(said, books.balance, books.due)

    def refuse_a_stale_write(self) -> None:
        """Do the same again, with a fence: the late write is refused, and done again from the start."""
        self._begin(WITH)
        alice = self._alice
        late = self._freeze_and_overtake("fenced")
        if late["refused_for"] is None:
            raise DblockError("A stale write got past the fence. This is a bug; please report it.")
        self._note(
            alice, "refused",
            f"writes {late['amount']}, as if nothing had happened: refused, for token {late['refused_for']} was seen",
            late, amount=late["amount"],
        )  # fmt: skip
        self._learn_of_the_loss()
        self._acquire(alice, "acquires it anew, under token {token}, and starts over")
        self._pause()
        self._read(alice, WITH, "reads the balance, {amount}")
        self._pause()
        self._write(alice, WITH, 30, "fenced", "adds 30 and writes {amount}: stored")
        self._pause()
        self._release(alice, "releases it")
        books = self._ledger.books(WITH)
        if books.balance != books.due:
            raise DblockError(
                f"The books do not add up behind the fence: they should show {books.due}, and show {books.balance}. "
                "This is a bug; please report it."
            )
        self._sums(f"should be {books.sum}, is {books.balance}: the books add up", books.balance, books.due)

    def count_tokens(self) -> None:
        """See that the tokens rose with the grants."""
        tokens = [event.token for event in self.events if event.kind == "held" and event.token is not None]
        text = f"tokens in the order of the grants: {', '.join(map(str, tokens))}"
        self._note(None, "tokens", text, {"at": time.monotonic()})
        if sorted(set(tokens)) != tokens:
            raise DblockError("The tokens did not rise with the grants. This is a bug; please report it.")

    def _freeze_and_overtake(self, how: str) -> dict[str, Any]:
        """Freeze alice in the middle, let bob make his deposit, and return what came of her write after it."""
        alice, bob, account = self._alice, self._bob, self._act
        self._ledger.open(account)
        token = self._acquire(alice, "holds the lock under token {token}")["token"]
        self._pause()
        self._read(alice, account, "reads the balance, {amount}, and is about to add 30")
        self._pause()
        frozen = alice.freeze()
        holder = self._lock.holder()
        if holder is None or holder.token != token:
            raise DblockError("alice has lost her lease before she was frozen: the machine is too busy for a story.")
        self._note(alice, "frozen", "is frozen with SIGSTOP, before she has written", {"at": frozen}, token=token)
        self._line_up(bob, "waits for the lock")
        ends = self._end_of_lease()
        granted = self._hear(bob)
        ended = {"at": min(ends, granted["at"])}
        self._note(alice, "expired", "has no lease any more: it ran out", ended, token=token)
        self._note(bob, "held", f"holds the lock under token {granted['token']}", granted)
        self._pause()
        self._read(bob, account, "reads the balance, {amount}")
        self._pause()
        self._write(bob, account, 50, how, "adds 50 and writes {amount}: stored")
        self._pause()
        self._release(bob, "releases it")
        self._pause()
        alice.tell("write", account, "30", how)
        self._note(alice, "woken", "goes on (SIGCONT)", {"at": alice.wake()})
        return self._hear(alice)

    def _end_of_lease(self) -> float:
        """Return when the frozen holder's lease ends; a renewal that was on its way at the last moment counts too."""
        while True:
            asked = time.monotonic()
            holder = self._lock.holder()
            if holder is None or holder.holder != "alice":
                return asked
            if holder.remaining < PAUSE:
                return asked + holder.remaining
            time.sleep(holder.remaining - PAUSE / 2)

    def _learn_of_the_loss(self) -> None:
        report = self._ask(self._alice, "release")
        if report["released"]:
            raise DblockError("A lease that had run out was released. This is a bug; please report it.")
        self._note(self._alice, "lost", "is told that her lease is over", {"at": report["answered"]})
        self._pause()

    def _meet(self, worker: Worker, text: str) -> None:
        self._note(worker, "here", f"{text}, process {worker.pid}", {"at": time.monotonic()})

    def _acquire(self, worker: Worker, text: str) -> dict[str, Any]:
        worker.tell("acquire")
        return self._granted(worker, text)

    def _granted(self, worker: Worker, text: str, since: float = 0.0) -> dict[str, Any]:
        report = self._hear(worker)
        if text:
            said = text.format(token=report["token"], after=(report["at"] - since) * 1000)
            self._note(worker, "held", said, report)
        return report

    def _line_up(self, worker: Worker, text: str) -> None:
        worker.tell("acquire")
        gives_up = time.monotonic() + PATIENCE
        while worker.name not in (waiter.holder for waiter in self._lock.queue()):
            if time.monotonic() > gives_up:
                raise DblockError(f"Worker {worker.name} has not come into the line within {PATIENCE:g} s.")
            time.sleep(0.01)
        self._note(worker, "waits", text, {"at": time.monotonic()})

    def _release(self, worker: Worker, text: str) -> float:
        report = self._ask(worker, "release")
        if not report["released"]:
            raise DblockError(f"{worker.name} has lost the lease meanwhile: the machine is too busy for a story.")
        self._note(worker, "released", text, report)
        return float(report["at"])

    def _read(self, worker: Worker, account: str, text: str) -> None:
        report = self._ask(worker, "read", account)
        self._note(worker, "read", text.format(amount=report["amount"]), report, amount=report["amount"])

    def _write(self, worker: Worker, account: str, amount: int, how: str, text: str) -> None:
        report = self._ask(worker, "write", account, str(amount), how)
        if report["refused_for"] is not None:
            raise DblockError(
                f"{worker.name}'s write was refused, who holds the lock. This is a bug; please report it."
            )
        self._note(worker, "stored", text.format(amount=report["amount"]), report, amount=report["amount"])

    def _ask(self, worker: Worker, word: str, *arguments: str) -> dict[str, Any]:
        worker.tell(word, *arguments)
        return self._hear(worker)

    def _hear(self, worker: Worker) -> dict[str, Any]:
        gives_up = time.monotonic() + PATIENCE
        while (report := worker.hear(0.5)) is None:
            self._lock.holder()  # an error if the database is gone, which a worker in line would sit out
            if time.monotonic() > gives_up:
                raise DblockError(f"Worker {worker.name} has not reported for {PATIENCE:g} s.")
        return report

    def _begin(self, act: str) -> None:
        self._act = act
        self._note(None, "act", act, {"at": time.monotonic()})

    def _sums(self, text: str, amount: int, due: int) -> None:
        self._note(None, "sums", f"the balance {text}", {"at": time.monotonic()}, amount=amount, due=due)

    def _note(
        self, worker: Worker | None, kind: str, text: str, report: dict[str, Any], token: int | None = None,
        amount: int | None = None, due: int | None = None,
    ) -> None:  # fmt: skip
        event = Event(
            at=report["at"] - self._began,
            act=self._act,
            who=worker.name if worker else "",
            kind=kind,
            text=text,
            token=report.get("token", token),
            amount=amount,
            due=due,
        )
        self.events.append(event)
        self._say(event)

    def _pause(self) -> None:
        time.sleep(PAUSE)
