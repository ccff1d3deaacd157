"""A command that runs while a lease is held, and not a moment longer.

Guarantee: when another may be granted the lock, nothing of the command runs any more, as long as this process runs at
all. Its end begins before that: while renewals fail, the command is asked to end (SIGTERM) with `grace` to spare, and
killed (SIGKILL) with a margin to spare, both counted back from when the lease can no longer be believed. Then, and
not before, the lock is released.

The database decides when the lease ends; this process only assumes that it may count from before its last renewal was
sent. If it is stopped past that, it kills the command as soon as it goes on; what the command wrote meanwhile is a
matter for the fence. If it is killed, a guard kills the command.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dblock import clock
from dblock.cli.ending import heard
from dblock.cli.running.tree import Guard, adopt, descendants, reap_adopted, send, send_group
from dblock.hold import Reason
from dblock.lease import Lease

TICK = 0.02
"""Seconds between two looks at the lease: a process that was frozen knows so soon that it was."""

PASSED_ON = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]
"""Signals that are the command's to answer. One that ends it ends us too."""

_OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}


class Supervisor:
    """One run of a command under a lease."""

    def __init__(self, lease: Lease, guard: Guard, grace: float, margin: float) -> None:
        self._lease = lease
        self._hold = lease._hold
        self._guard = guard
        self._grace = grace
        self._margin = margin
        self._process: subprocess.Popen[bytes] | None = None
        self._not_its: set[int] = set()
        """What runs below us and is not the command's: the guard."""
        self._kill_at: float | None = None
        """When it will be killed, having been asked to end because of its lease."""

    @property
    def is_lost(self) -> bool:
        """Whether the command was ended because of its lease."""
        return self._kill_at is not None

    @property
    def why(self) -> Reason:
        """Why the lease was lost, or would have been a moment later."""
        return self._hold.loss.reason if self._hold.loss else Reason.UNREACHABLE

    def run(self, command: Sequence[str], environment: dict[str, str]) -> int:
        """Run a command to its end, and return its exit code; 128 and its number for a signal."""
        adopt()
        woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        before: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._pass_on) for number in heard(*PASSED_ON)
        }
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _nothing)
        waking = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        try:
            self._not_its = set(descendants(os.getpid()))
            # A group of its own, to be signalled as one; and with whatever files a shell has opened for it.
            self._process = subprocess.Popen(list(command), env=environment, close_fds=False, **_OWN_GROUP)
            group = self._process.pid
            self._guard.watch(group)
            with _terminal_of(group):
                while self._process.poll() is None:
                    self._look()
                    if stopped := _stopped_by(group):
                        _stop_with(group, stopped)
                    if select.select([woken], [], [], TICK)[0]:
                        os.read(woken, 4096)
            self._end_all()
            code = self._process.returncode
            return code if code >= 0 else 128 - code
        finally:
            signal.set_wakeup_fd(waking)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(woken)
            os.close(wakes)

    def _look(self) -> None:
        """Ask the command to end, or kill it, if its lease is about to end."""
        lost = self._hold.lost()
        left = self._hold.trusted_until - clock.now()
        if lost is not None and lost.reason is not Reason.FORCED:
            left = 0.0
        if self._kill_at is None and (lost is not None or left <= self._grace + self._margin):
            self._kill_at = clock.now() + min(self._grace, max(left - self._margin, 0.0))
            self._send(signal.SIGTERM)
            self._send(signal.SIGCONT)
        if self._kill_at is not None and (clock.now() >= self._kill_at or left <= self._margin):
            self._send(signal.SIGKILL)

    def _end_all(self) -> None:
        """End what the command has left running: ask, and then kill."""
        gives_up = time.monotonic() + self._grace
        asked = False
        while self._anything_left():
            self._look()
            if not asked:
                asked = True
                self._send(signal.SIGTERM)
                self._send(signal.SIGCONT)
            elif time.monotonic() > gives_up:
                self._send(signal.SIGKILL)
            time.sleep(0.005)

    def _anything_left(self) -> bool:
        """Tell whether anything of the command runs, after its first process has ended."""
        assert self._process is not None
        reap_adopted(self._guard.pid)
        return bool(self._strays()) or send_group(self._process.pid, 0)

    def _send(self, number: int) -> None:
        """Send a signal to all of it."""
        assert self._process is not None
        send_group(self._process.pid, number)
        for pid in self._strays():
            send(pid, number)

    def _strays(self) -> list[int]:
        """Return what belongs to the command and has left its group."""
        assert self._process is not None
        return [
            pid for pid in descendants(os.getpid()) if pid not in self._not_its and _group_of(pid) != self._process.pid
        ]

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._process is not None:
            send_group(self._process.pid, number)


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _stopped_by(pid: int) -> int | None:
    """Return the signal that has stopped the command since we last looked, that of Ctrl-Z say."""
    if not hasattr(os, "waitid"):
        return None
    try:
        seen = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG)
    except ChildProcessError:
        return None
    return None if seen is None else seen.si_status


def _stop_with(group: int, number: int) -> None:
    """Stop as well, where a shell looks after us as a job, and go on with the command when we are continued."""
    terminal = _our_terminal(group)
    if terminal is None:
        return
    # It may have wanted the terminal just before that was given to it.
    if number not in (signal.SIGTTIN, signal.SIGTTOU):
        with _given_back(terminal, group):
            os.kill(os.getpid(), signal.SIGSTOP)
    send_group(group, signal.SIGCONT)


def _our_terminal(group: int) -> int | None:
    """Return our terminal, if we and nobody else use it: it belongs to us or to the command."""
    try:
        if sys.stdin is None or sys.stdout is None or not (sys.stdin.isatty() and sys.stdout.isatty()):
            return None  # beside others in a pipeline, it may be theirs to read
        number = sys.stdin.fileno()
        return number if os.tcgetpgrp(number) in (os.getpgrp(), group) else None
    except (OSError, ValueError):
        return None


@contextmanager
def _terminal_of(group: int) -> Iterator[None]:
    """Let a group have our terminal, so that it can read from it and is asked by Ctrl-C itself."""
    terminal = _our_terminal(group)
    if terminal is not None:
        _give(terminal, group)
    try:
        yield
    finally:
        if terminal is not None:
            _give(terminal, os.getpgrp())


@contextmanager
def _given_back(terminal: int, group: int) -> Iterator[None]:
    _give(terminal, os.getpgrp())
    try:
        yield
    finally:
        _give(terminal, group)


def _give(terminal: int, group: int) -> None:
    # Who is not in the foreground would be stopped for doing this.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        os.tcsetpgrp(terminal, group)
    except OSError:
        return
    finally:
        signal.signal(signal.SIGTTOU, before)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Let a signal wake us, and do no more."""
