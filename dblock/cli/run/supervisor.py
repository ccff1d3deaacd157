"""A command that runs while a lease is held, and not a moment longer.

Guarantee: when another may be granted the lock, nothing of the command runs any more; and the lock is released only
when nothing does. A keeper, a process of its own, starts the command and ends it in time (dblock.cli.run.keeper).
This side tells it until when the lease can be believed, and of signals, and hears what became of the command.

The database decides when the lease ends; this process only assumes that it may count from before its last renewal was
sent. If everything is frozen past that, the command is killed as soon as the keeper goes on; what it wrote meanwhile
is a matter for the fence.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from dblock._core import clock
from dblock._core.lease_state import Reason
from dblock.cli.run import tree
from dblock.cli.run.keeper import STUCK, TICK, fork_keeper
from dblock.cli.run.tty import our_tty
from dblock.cli.signals import heard
from dblock.lease import Lease

PASSED_ON = [
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
]
"""Signals that are the command's to answer. One that ends it ends us too."""

CLEAN_LOOKS = 50
"""How many looks must find nothing, where the kernel cannot tell for what ran before us."""

KILLED = 128 + signal.SIGKILL


class CannotStart(Exception):
    """The command could not be started; the number says why, as the system has it."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


class Supervisor:
    """One run of a command. Made before there are threads, for its keeper is a fork that goes on as it is."""

    def __init__(self) -> None:
        self._not_its: set[int] = set()
        """What ran below us before, and is not the command's."""
        self._started = False
        self._keeper, self._tell_to, self._hear_from = fork_keeper()
        self._heard = b""
        self._pid = 0
        self._code: int | None = None
        self._gone = False
        self._stopped: int | None = None
        self._signals: list[int] = []
        self._told_until = 0.0
        self._asked = False
        self.is_lost = False
        """Whether the command was ended because of its lease."""
        self.keeper_is_lost = False
        """Whether the keeper was killed, and the command with it."""
        self.stuck: list[int] = []
        """What could not be ended."""
        self.why = Reason.UNREACHABLE
        """Why the lease was lost, or would have been a moment later."""

    def run(
        self, lease: Lease, command: Sequence[str], environment: dict[str, str], grace: float, margin: float
    ) -> int:
        """Run a command to its end, and return its exit code; 128 and its number for a signal."""
        woken, wakes = os.pipe()
        for end in (woken, wakes):
            os.set_blocking(end, False)
        before: dict[signal.Signals, Any] = {n: signal.signal(n, self._pass_on) for n in heard(*PASSED_ON)}
        waking = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        tty = our_tty()
        if tty is not None:
            tty.remember()
        try:
            # Should the keeper be killed, what it had comes to us.
            self._not_its = {*tree.descendants()} - {self._keeper}
            tree.adopt()
            self._started = True
            self._tell(
                start=list(command), environment=environment, grace=grace, margin=margin, until=lease.trusted_until,
                # Beside others in a pipeline the terminal may be theirs to read; the command gets it when it asks.
                foreground=tty is not None and tty.is_ours() and os.isatty(0) and os.isatty(1),
            )  # fmt: skip
            while not self._gone:
                self._tell_of_lease(lease)
                if clock.now() >= self._told_until - margin / 2:
                    # The keeper should have seen to it by now, if it runs at all.
                    self._kill_all()
                while self._signals:
                    self._tell(signal=self._signals.pop(0))
                ready = tree.readable([self._hear_from, woken], TICK)
                if woken in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(woken, 4096)
                if self._hear_from in ready:
                    self._hear()
                if self._stopped is not None:
                    self._stop_too(self._stopped)
            return KILLED if self._code is None else self._code
        finally:
            self.end()
            if tty is not None and self._pid:
                tty.take_back(self._pid)
                if self._code is None or self._code > 128:
                    tty.restore()
            signal.set_wakeup_fd(waking)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(woken)
            os.close(wakes)

    def _tell_of_lease(self, lease: Lease) -> None:
        reason = lease.lost.reason
        until = lease.trusted_until
        if reason is not None:
            self.why = reason
            if reason is not Reason.FORCED:
                until = 0.0
        if until != self._told_until:
            self._told_until = until
            self._tell(until=until)
        if reason is not None and not self._asked:
            # To let go at once; with time to, if it was told to: its deadline stays.
            self._asked = True
            self._tell(end=True)

    def end(self) -> None:
        """See to it that nothing of the command runs any more, and that its keeper ends; can be called again."""
        if self._tell_to >= 0:
            os.close(self._tell_to)  # which says it all
            self._tell_to = -1
        while not self.is_over:
            self._hear()
        if self._hear_from >= 0:
            os.close(self._hear_from)
            self._hear_from = -1
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._keeper, 0)

    @property
    def is_over(self) -> bool:
        """Whether nothing of the command runs any more, or ever did; but for what is `stuck`."""
        return self._gone

    def _kill_all(self) -> list[int]:
        """Kill what is the command's, as far as one look can tell, and return it."""
        found = [pid for pid in tree.descendants(self._not_its) if pid != self._keeper]
        for pid in found:
            tree.send(pid, signal.SIGKILL)
        return found

    def _tell(self, **what: Any) -> None:
        said = json.dumps(what).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # its end is heard of by the other pipe
            while said:
                said = said[os.write(self._tell_to, said) :]

    def _hear(self) -> None:
        part = os.read(self._hear_from, 65536)
        if not part:
            self._outlive_keeper()
            return
        *lines, self._heard = (self._heard + part).split(b"\n")
        for line in lines:
            told = json.loads(line)
            self._pid = told.get("pid", self._pid)
            self._stopped = told.get("stopped", self._stopped)
            if "failed" in told:
                self._gone = True
                raise CannotStart(told["failed"], told["why"])
            self._code = told.get("code", self._code)
            self.is_lost = told.get("for_lease", self.is_lost)
            self.stuck = told.get("stuck", self.stuck)
            self._gone = self._gone or "gone" in told or "stuck" in told

    def _outlive_keeper(self) -> None:
        """End what is left, the keeper having ended in a way that nobody foresaw; what it had is ours now."""
        self.keeper_is_lost = self._started
        gives_up = clock.now() + STUCK
        clean = 0
        while self._started and clean < CLEAN_LOOKS and clock.now() < gives_up:
            self.stuck = self._kill_all()
            if self._pid and sys.platform != "linux":
                tree.send_group(self._pid, signal.SIGKILL)
            for pid in tree.children():
                if pid not in self._not_its:
                    tree.send(pid, signal.SIGKILL)
            clean = 0 if self.stuck else clean + 1
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    clean = 0
            except ChildProcessError:
                self.stuck = []  # the kernel knows better than any look: nothing is left
                break
            time.sleep(0.001)
        self._gone = True

    def _stop_too(self, number: int) -> None:
        """Be stopped with the command, where a shell looks after us as a job, and go on with it."""
        self._stopped = None
        tty = our_tty()
        if tty is None or self._code is not None:
            return
        if number in (signal.SIGTTIN, signal.SIGTTOU) and tty.is_ours():
            # It wants the terminal, which we have no use for.
            self._tell(**{"continue": True})
            return
        if not _is_job():
            # Nobody would let us go on.
            if number != signal.SIGSTOP:
                self._tell(**{"continue": tty.group in (os.getpgrp(), self._pid)})
            return
        tty.take_back(self._pid)
        self._tell(stops=True)
        os.killpg(os.getpgrp(), signal.SIGSTOP)  # all of the job, a script around us too
        # Here we go on, in the foreground or not. Whether the command may, the keeper knows.
        self._tell(**{"continue": tty.is_ours()})

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)


def _is_job() -> bool:
    """Whether somebody is there to let us go on, should we stop: a shell, in the same session."""
    try:
        return os.getsid(0) != os.getpid() and os.getsid(os.getppid()) == os.getsid(0)
    except OSError:
        return False
