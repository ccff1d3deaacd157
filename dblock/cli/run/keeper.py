"""The process that starts the command and sees to its end.

Guarantee: what it has started is gone by the time that it was given, as long as it runs at all; and it says so only
when it is. It knows nothing of locks and has no connection, no threads, and no children but the command's. It is told
until when the command may run, again and again. Not told in time, or told no more because the process that tells it
was stopped or killed, it ends the command by itself: SIGTERM with `grace` to spare, SIGKILL with `margin` to spare.

On Linux it adopts whatever the command leaves behind, in whatever group or session, so that the kernel itself says
when nothing is left: it has no children any more. Elsewhere the command's process group is all that can be seen.
Should the keeper be killed, the kernel kills the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from dblock._core import clock
from dblock.cli.run import tree
from dblock.cli.run.tty import our_tty

SIGNALS = [
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP,
    signal.SIGTTIN, signal.SIGTTOU,
]  # fmt: skip
"""What the keeper does not listen to: it is told by its pipe what to pass on."""

TICK = 0.02
"""Seconds between two looks at the clock: one that was frozen knows so soon that it was."""

STUCK = 5.0
"""Seconds after which what cannot be killed is given up: it runs as another user, or hangs in the kernel."""


class Keeper:
    """The keeper's own side."""

    def __init__(self, told: int, tells: int, dispositions: Mapping[int, Any]) -> None:
        self._told, self._tells = told, tells
        self._dispositions = dispositions
        self._heard = b""
        self._unsaid = b""
        self._pid = 0
        self._code: int | None = None
        self._until = float("inf")
        self._grace = self._margin = 0.0
        self._kill_at: float | None = None
        self._for_lease = False
        """Whether the command was ended because its time was over."""
        self._killing_since: float | None = None
        self._stops_with_it = False
        """Whether who tells us has stopped, because the command has."""

    def serve(self) -> None:
        """Do what is asked until nothing is left to do."""
        woken, wakes = os.pipe()
        for end in (woken, wakes):
            os.set_blocking(end, False)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        tree.adopt()
        # Whoever should hear us may be frozen; we have better things to do than to wait for that.
        os.set_blocking(self._tells, False)
        while self._told >= 0 or self._pid:
            self._say()
            waited_for = [woken] if self._told < 0 else [woken, self._told]
            ready = tree.readable(waited_for, TICK if self._pid else None)
            if woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
            # The time first: what comes over the pipe may be a wish to go on.
            self._look()
            if self._told in ready:
                self._listen()
            if self._pid and self._reap():
                break
        self._tell(gone=True, for_lease=self._for_lease)
        os.set_blocking(self._tells, True)
        self._say()

    def _listen(self) -> None:
        part = os.read(self._told, 65536)
        if not part:
            # Who tells us is gone.
            self._told = -1
            self._until = 0.0
            self._look()
            return
        *lines, self._heard = (self._heard + part).split(b"\n")
        for line in lines:
            self._do(json.loads(line))

    def _do(self, told: dict[str, Any]) -> None:
        self._until = told.get("until", self._until)
        self._stops_with_it = "stops" in told
        if "start" in told:
            self._start(told)
        elif "signal" in told:
            self._pass_on(told["signal"])
        elif "end" in told:
            self._ask_to_end(self._until - clock.now())
        elif "continue" in told:
            self._continue(told["continue"])

    def _start(self, told: dict[str, Any]) -> None:
        self._grace, self._margin = told["grace"], told["margin"]
        foreground = told["foreground"]

        def prepare() -> None:
            # A group of its own, to be signalled as one; in the foreground before it can ask for anything.
            os.setpgid(0, 0)
            tty = our_tty() if foreground else None
            if tty is not None:
                tty.give(os.getpid())
            for number, disposition in self._dispositions.items():
                signal.signal(number, disposition)
            tree.die_with_parent()
            if self._is_over():
                raise TimeoutError

        if self._is_over():
            self._give_up_start()
            return
        try:
            # With whatever files a shell has opened for it. Nothing else runs here, so the fork is a safe one.
            started = subprocess.Popen(told["start"], env=told["environment"], close_fds=False, preexec_fn=prepare)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            if self._is_over():
                self._give_up_start()
                return
            self._tell(failed=getattr(error, "errno", None) or 0, why=str(error))
            return
        self._pid = started.pid
        started.returncode = 0  # it is waited for here, with all the others
        self._tell(pid=self._pid)
        self._look()

    def _is_over(self) -> bool:
        return clock.now() >= self._until - self._margin

    def _give_up_start(self) -> None:
        """Start nothing: there is no time for it any more."""
        self._for_lease = True
        self._told = -1

    def _look(self) -> None:
        """Ask the command to end, or kill it, if its time is about to be over."""
        if not self._pid:
            return
        left = self._until - clock.now()
        if left <= self._grace + self._margin and self._kill_at is None:
            self._ask_to_end(left)
        if self._kill_at is not None and (clock.now() >= self._kill_at or left <= self._margin):
            self._for_lease = self._for_lease or left <= self._margin
            self._kill()

    def _ask_to_end(self, left: float) -> None:
        if self._kill_at is not None or not self._pid:
            return
        self._for_lease = True
        self._kill_at = clock.now() + min(self._grace, max(left - self._margin, 0.0))
        if self._kill_at > clock.now():
            # Only with time to spare: it goes on to end, if it was stopped.
            self._send(signal.SIGTERM)
            self._send(signal.SIGCONT)

    def _kill(self) -> None:
        self._killing_since = self._killing_since or clock.now()
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        tree.send_group(self._pid, number)
        for pid, group in tree.descendants().items():
            if group != self._pid:  # else it was sent already, and twice may be too much
                tree.send(pid, number)

    def _pass_on(self, number: int) -> None:
        if self._pid:
            tree.send_group(self._pid, number)
            if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT) and self._kill_at is None:
                tree.send_group(self._pid, signal.SIGCONT)

    def _continue(self, foreground: bool) -> None:
        if self._kill_at is None and self._pid:
            tty = our_tty() if foreground else None
            if tty is not None:
                tty.give(self._pid)
            tree.send_group(self._pid, signal.SIGCONT)

    def _reap(self) -> bool:
        """Take note of who has ended; tell whether nothing is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                # Elsewhere than on Linux what the command has left in its group is another's child.
                if sys.platform != "linux" and tree.send_group(self._pid, 0):
                    break
                return True
            if pid == 0:
                break
            if pid == self._pid and os.WIFSTOPPED(status):
                if not self._unsaid:
                    self._tell(stopped=os.WSTOPSIG(status))
            elif pid == self._pid and os.WIFCONTINUED(status):
                # By somebody else, perhaps; who has stopped with it goes on with it.
                if self._stops_with_it:
                    tree.send(os.getppid(), signal.SIGCONT)
            elif pid == self._pid:
                code = os.waitstatus_to_exitcode(status)
                self._code = code if code >= 0 else 128 - code
                self._tell(code=self._code, for_lease=self._for_lease)
        if self._code is not None:
            self._end_the_rest()
        return self._is_stuck()

    def _end_the_rest(self) -> None:
        """End what the command has left running: ask, and then kill; those that keep moving without a pause."""
        if self._kill_at is None:
            self._kill_at = clock.now() + self._grace
            self._send(signal.SIGTERM)
            self._send(signal.SIGCONT)
        elif self._killing_since is not None:
            for pid in tree.children():
                tree.send(pid, signal.SIGKILL)

    def _is_stuck(self) -> bool:
        if self._killing_since is None or clock.now() < self._killing_since + STUCK:
            return False
        self._tell(stuck=list(tree.descendants()) or [self._pid])
        return True

    def _tell(self, **what: Any) -> None:
        self._unsaid += json.dumps(what).encode() + b"\n"
        self._say()

    def _say(self) -> None:
        """Say what has not been said yet, as far as there is room for it."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsaid:
                self._unsaid = self._unsaid[os.write(self._tells, self._unsaid) :]


def fork_keeper() -> tuple[int, int, int]:
    """Start a keeper, before there are threads; return its process, where to tell it, and where it tells."""
    told, tell = os.pipe()
    hear, tells = os.pipe()
    dispositions: dict[int, Any] = {
        number: signal.SIG_IGN if signal.getsignal(number) == signal.SIG_IGN else signal.SIG_DFL
        for number in (*SIGNALS, signal.SIGCHLD)
    }
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, nobody's end could be waited for
    pid = os.fork()
    if pid == 0:
        try:
            os.close(tell)
            os.close(hear)
            # Out of reach of what is sent to our group, in the same session: the terminal is the command's, too.
            os.setpgid(0, 0)
            Keeper(told, tells, dispositions).serve()
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(2, f"dblock: the keeper failed: {type(error).__name__}: {error}\n".encode())
        finally:
            sys.stdout = sys.stderr = None  # what they hold is our parent's to write
            os._exit(0)
    os.close(told)
    os.close(tells)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    return pid, tell, hear
