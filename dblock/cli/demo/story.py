"""The story: which worker gets which cue, and when. Events drive it, not the clock.

Each cue follows an observed event: a worker is in the queue, its process has stopped, its lease has ended. The pauses
in between are there for the reader; however long they take, the story is the same. What must come true is checked
against the ledger and the tokens, and the story fails if it does not.
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
from dblock.cli.demo.ledger import Ledger, temporary_ledger
from dblock.client import Client
from dblock.errors import DblockError

TTL = 1.8
PAUSE = 0.25
"""Seconds between cues, so that the user can read along and the picture shows them apart."""
PATIENCE = 30.0
"""Seconds to wait for something that must happen."""

PROLOGUE = "Prologue: one lock, handed over"
WITHOUT = "Act one: without a fence"
WITH = "Act two: with the fence"


def tell_story(target: Target, schema: str, say: Say) -> list[Event]:
    """Let two workers contend for a lock and keep a ledger under it; pass each event to `say` when it has happened."""
    number = secrets.token_hex(3)
    with (
        temporary_ledger(target, f"dblock_demo_{number}") as ledger,
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
    """One run of the story."""

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
        """Hand the lock over, kill its holder, and measure how soon the waiter holds it."""
        alice, bob = self._alice, self._bob
        for worker in (alice, bob):
            self._report_of(worker)
        self._began = time.monotonic()
        self._begin(PROLOGUE)
        for worker in (alice, bob):
            self._meet(worker, "is here")
        self._acquire(alice, f"holds {self._lock.name!r} under token {{token}}, for {TTL:g} s unless renewed")
        tried = self._perform(bob, "try_once")
        self._note(bob, "tried", f"tries once: {tried['holder']} holds it", tried)
        self._join_queue(bob, "joins the queue")
        self._pause()
        self._note(alice, "renewed", f"renews: the {TTL:g} s start again", self._perform(alice, "renew"))
        self._pause()
        released = self._release(alice, "releases it")
        self._granted(bob, "holds it under token {token}, {after:.0f} ms after the release", released)
        self._join_queue(alice, "joins the queue again")
        self._pause()
        holder, context = self._lock.holder(), time.monotonic()
        if holder is None or holder.holder != "bob":
            raise DblockError(
                "bob lost his lease before he was killed: the machine is too busy for the demo. Run it again."
            )
        killed = bob.kill()
        self._note(bob, "killed", "is killed with kill -9, holding the lock", {"at": killed})
        would_end = context + holder.remaining
        self._bob = self._enter("bob")
        granted = self._granted(alice, "", killed)
        left = would_end - granted["at"]
        soon = f"with {left:.1f} s of his lease left" if left > 0 else "after his lease had expired"
        after = (granted["at"] - killed) * 1000
        self._note(
            alice, "held", f"holds it under token {granted['token']}, {after:.0f} ms after the kill, {soon}", granted
        )
        self._pause()
        self._release(alice, "releases it")

    def lose_a_deposit(self) -> None:
        """Freeze a holder between its read and its write; its late write undoes another deposit."""
        self._begin(WITHOUT)
        self._report_of(self._bob)
        self._meet(self._bob, "is back")
        late = self._freeze_and_overtake("plain")
        books = self._ledger.books(WITHOUT)
        gone = books.due - books.balance
        if late["refused_for"] is not None or not gone:
            raise DblockError(
                f"Act one failed: after alice's late write the balance is {books.balance}, and with all deposits it "
                f"should be {books.due}. This is a bug; please report it."
            )
        self._note(
            self._alice, "corrupted", f"writes {late['amount']}, unaware of the pause: stored", late,
            amount=late["amount"],
        )  # fmt: skip
        self._report_loss()
        said = f"should be {books.sum}, is {books.balance}: {gone} {'are' if gone > 1 else 'is'} gone"
        self._sums(said, books.balance, books.due)

    def refuse_a_stale_write(self) -> None:
        """Repeat this with a fence: the late write is refused, and alice starts over."""
        self._begin(WITH)
        alice = self._alice
        late = self._freeze_and_overtake("fenced")
        if late["refused_for"] is None:
            raise DblockError("A stale write got past the fence. This is a bug; please report it.")
        self._note(
            alice, "refused",
            f"writes {late['amount']}, unaware of the pause: refused, because token {late['refused_for']} was seen",
            late, amount=late["amount"],
        )  # fmt: skip
        self._report_loss()
        self._acquire(alice, "acquires it again, under token {token}, and starts over")
        self._pause()
        self._read(alice, WITH, "reads the balance, {amount}")
        self._pause()
        self._write(alice, WITH, 30, "fenced", "adds 30 and writes {amount}: stored")
        self._pause()
        self._release(alice, "releases it")
        books = self._ledger.books(WITH)
        if books.balance != books.due:
            raise DblockError(
                f"The books do not add up behind the fence: the balance should be {books.due} and is {books.balance}. "
                "This is a bug; please report it."
            )
        self._sums(f"should be {books.sum}, is {books.balance}: the books add up", books.balance, books.due)

    def count_tokens(self) -> None:
        """Check that the tokens rose with the grants."""
        tokens = [event.token for event in self.events if event.kind == "held" and event.token is not None]
        text = f"tokens in the order of the grants: {', '.join(map(str, tokens))}"
        self._note(None, "tokens", text, {"at": time.monotonic()})
        if sorted(set(tokens)) != tokens:
            raise DblockError("The tokens did not rise with the grants. This is a bug; please report it.")

    def _freeze_and_overtake(self, how: str) -> dict[str, Any]:
        """Freeze alice between read and write, let bob make his deposit, and return the report of her late write."""
        alice, bob, account = self._alice, self._bob, self._act
        self._ledger.open(account)
        token = self._acquire(alice, "holds the lock under token {token}")["token"]
        self._pause()
        self._read(alice, account, "reads the balance, {amount}, and is about to add 30")
        self._pause()
        frozen = alice.freeze()
        holder = self._lock.holder()
        if holder is None or holder.token != token:
            raise DblockError(
                "alice lost her lease before she was frozen: the machine is too busy for the demo. Run it again."
            )
        self._note(alice, "frozen", "is frozen with SIGSTOP, before she writes", {"at": frozen}, token=token)
        self._join_queue(bob, "joins the queue for the lock")
        ends = self._end_of_lease()
        granted = self._report_of(bob)
        ended = {"at": min(ends, granted["at"])}
        self._note(alice, "expired", "no longer has a lease: it expired", ended, token=token)
        self._note(bob, "held", f"holds the lock under token {granted['token']}", granted)
        self._pause()
        self._read(bob, account, "reads the balance, {amount}")
        self._pause()
        self._write(bob, account, 50, how, "adds 50 and writes {amount}: stored")
        self._pause()
        self._release(bob, "releases it")
        self._pause()
        alice.send("write", account, "30", how)
        self._note(alice, "woken", "continues (SIGCONT)", {"at": alice.wake()})
        return self._report_of(alice)

    def _end_of_lease(self) -> float:
        """Return the time at which the frozen holder's lease ends, including a renewal that was sent just before."""
        while True:
            context = time.monotonic()
            holder = self._lock.holder()
            if holder is None or holder.holder != "alice":
                return context
            if holder.remaining < PAUSE:
                return context + holder.remaining
            time.sleep(holder.remaining - PAUSE / 2)

    def _report_loss(self) -> None:
        report = self._perform(self._alice, "release")
        if report["released"]:
            raise DblockError("An expired lease was released. This is a bug; please report it.")
        self._note(self._alice, "lost", "learns that her lease is lost", {"at": report["answered"]})
        self._pause()

    def _meet(self, worker: Worker, text: str) -> None:
        self._note(worker, "here", f"{text}, process {worker.pid}", {"at": time.monotonic()})

    def _acquire(self, worker: Worker, text: str) -> dict[str, Any]:
        worker.send("acquire")
        return self._granted(worker, text)

    def _granted(self, worker: Worker, text: str, since: float = 0.0) -> dict[str, Any]:
        report = self._report_of(worker)
        if text:
            said = text.format(token=report["token"], after=(report["at"] - since) * 1000)
            self._note(worker, "held", said, report)
        return report

    def _join_queue(self, worker: Worker, text: str) -> None:
        worker.send("acquire")
        deadline = time.monotonic() + PATIENCE
        while worker.name not in (waiter.holder for waiter in self._lock.queue()):
            if time.monotonic() > deadline:
                raise DblockError(f"Worker {worker.name} did not join the queue within {PATIENCE:g} s.")
            time.sleep(0.01)
        self._note(worker, "waits", text, {"at": time.monotonic()})

    def _release(self, worker: Worker, text: str) -> float:
        report = self._perform(worker, "release")
        if not report["released"]:
            raise DblockError(
                f"{worker.name} lost the lease too early: the machine is too busy for the demo. Run it again."
            )
        self._note(worker, "released", text, report)
        return float(report["at"])

    def _read(self, worker: Worker, account: str, text: str) -> None:
        report = self._perform(worker, "read", account)
        self._note(worker, "read", text.format(amount=report["amount"]), report, amount=report["amount"])

    def _write(self, worker: Worker, account: str, amount: int, how: str, text: str) -> None:
        report = self._perform(worker, "write", account, str(amount), how)
        if report["refused_for"] is not None:
            raise DblockError(
                f"The write of {worker.name}, which holds the lock, was refused. This is a bug; please report it."
            )
        self._note(worker, "stored", text.format(amount=report["amount"]), report, amount=report["amount"])

    def _perform(self, worker: Worker, word: str, *arguments: str) -> dict[str, Any]:
        worker.send(word, *arguments)
        return self._report_of(worker)

    def _report_of(self, worker: Worker) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while (report := worker.receive(0.5)) is None:
            self._lock.holder()  # raises if the database is gone, which a waiting worker would not report
            if time.monotonic() > deadline:
                raise DblockError(f"Worker {worker.name} has sent no report for {PATIENCE:g} s.")
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
            worker=worker.name if worker else "",
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
