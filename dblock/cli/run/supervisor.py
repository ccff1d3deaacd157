"""Run a command while a lease is held, and not a moment longer.

Guarantee: when another client may be granted the lock, nothing of the command runs any more, and the lock is released
only after everything of the command has ended. A keeper, which is a separate process, starts the command and ends it
in time (dblock.cli.run.keeper). The supervisor sends the keeper the end of the trust window and the signals to
forward, and reads what became of the command.

The database decides when the lease ends. This process only assumes that it may count from before its last renewal was
sent. If the whole machine is frozen past that, the keeper kills the command as soon as it runs again; only a fence can
refuse what the command wrote in between.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from dblock._core import clock
from dblock._core.lease_state import Reason
from dblock.cli.run import process_tree
from dblock.cli.run.keeper import STUCK_AFTER, TICK, fork_keeper
from dblock.cli.run.terminal import controlling_terminal
from dblock.cli.signals import not_ignored
from dblock.lease import Lease

FORWARDED_SIGNALS = [
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
]
"""Signals that the command handles. If a signal ends the command, `dblock run` ends with it."""

CLEAN_SCANS = 50
"""How many scans in a row must find nothing, where children from before the start keep the kernel from telling."""

FIRST_PATIENCE = 2.0
"""Seconds that the command runs on after a loss while `before_end` works. The lease's deadline still counts."""

KILLED_EXIT_CODE = 128 + signal.SIGKILL


class StartFailed(Exception):
    """The command could not be started; `number` is the system's errno, or 0."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


class Supervisor:
    """One run of a command. Create it before the process has threads, because it forks its keeper."""

    def __init__(self, error_fd: int | None = None) -> None:
        """Fork the keeper. `error_fd` is what the command gets as its standard error, if it is not this process's."""
        self._foreign_pids: set[int] = set()
        """Descendants from before the start, which do not belong to the command."""
        self._started = False
        self._keeper, self._commands_fd, self._reports_fd = fork_keeper(error_fd)
        self._inbox = b""
        self._pid = 0
        self._code: int | None = None
        self._finished = False
        self._stopped: int | None = None
        self._signals: list[int] = []
        self._sent_deadline = 0.0
        self._asked_to_end = False
        self._before_end: Callable[[], object] | None = None
        self._preparation: threading.Thread | None = None
        self._prepared_by = 0.0
        self.forwarded: set[int] = set()
        """The signals that were forwarded to the command."""
        self.lease_ended = False
        """Whether the command was ended because of its lease."""
        self.keeper_died = False
        """Whether the keeper was killed, and the command with it."""
        self.stuck: list[int] = []
        """The processes that could not be ended."""
        self.loss_reason = Reason.UNREACHABLE
        """Why the lease was lost, or would have been a moment later."""

    def run(
        self,
        lease: Lease,
        command: Sequence[str],
        environment: dict[str, str],
        grace: float,
        margin: float,
        before_end: Callable[[], object] | None = None,
    ) -> int:
        """Run a command to its end and return its exit code, or 128 + N if signal N ended it.

        If the lease is lost, `before_end` is called in a thread, and the command is ended when it has returned.
        """
        self._before_end = before_end
        wake_reader, wake_writer = os.pipe()
        for fd in (wake_reader, wake_writer):
            os.set_blocking(fd, False)
        before: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._queue_signal) for number in not_ignored(*FORWARDED_SIGNALS)
        }
        wakeup_before = signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        terminal = controlling_terminal()
        if terminal is not None:
            terminal.save_modes()
        try:
            # If the keeper is killed, this process adopts the keeper's children.
            self._foreign_pids = {*process_tree.scan_descendants()} - {self._keeper}
            process_tree.become_subreaper()
            self._started = True
            self._sent_deadline = lease.trusted_until
            self._send_command(
                start=list(command), environment=environment, grace=grace, margin=margin, deadline=self._sent_deadline,
                # In a pipeline another process may be reading the terminal; the command gets it when it asks.
                foreground=terminal is not None and terminal.in_foreground() and os.isatty(0) and os.isatty(1),
            )  # fmt: skip
            while not self._finished:
                self._send_deadline(lease)
                if clock.now() >= self._sent_deadline - margin / 2:
                    # A keeper that runs at all would have killed the command by now.
                    self._kill_all()
                while self._signals:
                    self.forwarded.add(self._signals[0])
                    self._send_command(signal=self._signals.pop(0))
                ready = process_tree.wait_readable([self._reports_fd, wake_reader], TICK)
                if wake_reader in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_reader, 4096)
                if self._reports_fd in ready:
                    self._read_reports()
                if self._stopped is not None:
                    self._stop_with_command(self._stopped)
            return KILLED_EXIT_CODE if self._code is None else self._code
        finally:
            self.end()
            if terminal is not None and self._pid:
                terminal.reclaim(self._pid)
                if self._code is None or self._code > 128:
                    terminal.restore_modes()
            signal.set_wakeup_fd(wakeup_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(wake_reader)
            os.close(wake_writer)

    def _send_deadline(self, lease: Lease) -> None:
        reason = lease.lost.reason
        deadline = lease.trusted_until
        if reason is not None and not self._is_prepared():
            self.loss_reason = reason
            return
        if reason is not None:
            self.loss_reason = reason
            if reason is not Reason.FORCED:
                deadline = 0.0
        if deadline != self._sent_deadline:
            self._sent_deadline = deadline
            self._send_command(deadline=deadline)
        if reason is not None and not self._asked_to_end:
            # End the command now. After a forced release the lease's deadline stays, so the command has its grace.
            self._asked_to_end = True
            self._send_command(end=True)

    def _is_prepared(self) -> bool:
        """Return whether the command may be ended: `before_end` has returned, or takes too long."""
        if self._before_end is None:
            return True
        if self._preparation is None:
            self._prepared_by = clock.now() + FIRST_PATIENCE
            self._preparation = threading.Thread(target=self._before_end, name="dblock-before-end", daemon=True)
            self._preparation.start()
        return not self._preparation.is_alive() or clock.now() >= self._prepared_by

    def has_stopped(self) -> bool:
        """Return whether a process of the command has been stopped by a signal, where the system shows it."""
        return process_tree.has_stopped_child(self._keeper)

    def end(self) -> None:
        """End everything of the command, and the keeper. Calling this again does nothing."""
        if self._commands_fd >= 0:
            os.close(self._commands_fd)  # the keeper ends the command when this pipe closes
            self._commands_fd = -1
        while not self.finished:
            self._read_reports()
        if self._reports_fd >= 0:
            os.close(self._reports_fd)
            self._reports_fd = -1
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._keeper, 0)

    @property
    def finished(self) -> bool:
        """Whether nothing of the command runs any more, or ever did, except the processes in `stuck`."""
        return self._finished

    def _kill_all(self) -> list[int]:
        """Kill the command's processes, as far as one scan can find them, and return them."""
        found = [pid for pid in process_tree.descendants(self._foreign_pids) if pid != self._keeper]
        for pid in found:
            process_tree.send_signal(pid, signal.SIGKILL)
        return found

    def _send_command(self, **command: Any) -> None:
        message = json.dumps(command).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # the reports pipe tells that the keeper has ended
            while message:
                message = message[os.write(self._commands_fd, message) :]

    def _read_reports(self) -> None:
        part = os.read(self._reports_fd, 65536)
        if not part:
            self._clean_up_after_keeper()
            return
        *lines, self._inbox = (self._inbox + part).split(b"\n")
        for line in lines:
            report = json.loads(line)
            self._pid = report.get("pid", self._pid)
            self._stopped = report.get("stopped", self._stopped)
            if "failed" in report:
                self._finished = True
                raise StartFailed(report["failed"], report["why"])
            self._code = report.get("code", self._code)
            self.lease_ended = report.get("for_lease", self.lease_ended)
            self.stuck = report.get("stuck", self.stuck)
            self._finished = self._finished or "gone" in report or "stuck" in report

    def _clean_up_after_keeper(self) -> None:
        """End what is left after the keeper has died unexpectedly; its children are ours now."""
        self.keeper_died = self._started
        deadline = clock.now() + STUCK_AFTER
        clean_scans = 0
        while self._started and clean_scans < CLEAN_SCANS and clock.now() < deadline:
            self.stuck = self._kill_all()
            if self._pid and sys.platform != "linux":
                process_tree.signal_group(self._pid, signal.SIGKILL)
            for pid in process_tree.children():
                if pid not in self._foreign_pids:
                    process_tree.send_signal(pid, signal.SIGKILL)
            clean_scans = 0 if self.stuck else clean_scans + 1
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    clean_scans = 0
            except ChildProcessError:
                self.stuck = []  # the kernel is surer than any scan: we have no children
                break
            time.sleep(0.001)
        self._finished = True

    def _stop_with_command(self, number: int) -> None:
        """Stop together with the command if a shell controls us as a job, and continue together with it."""
        self._stopped = None
        terminal = controlling_terminal()
        if terminal is None or self._code is not None:
            return
        if number in (signal.SIGTTIN, signal.SIGTTOU) and terminal.in_foreground():
            # The command wants the terminal, which this process does not need.
            self._send_command(**{"continue": True})
            return
        if not _is_job():
            # No shell would continue us.
            if number != signal.SIGSTOP:
                self._send_command(**{"continue": terminal.group in (os.getpgrp(), self._pid)})
            return
        terminal.reclaim(self._pid)
        self._send_command(stops=True)
        os.killpg(os.getpgrp(), signal.SIGSTOP)  # the whole job, including a script around us
        # The shell has continued us, in the foreground or in the background. The keeper decides about the command.
        self._send_command(**{"continue": terminal.in_foreground()})

    def _queue_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)


def _is_job() -> bool:
    """Return whether a shell in the same session could continue us if we stopped."""
    try:
        return os.getsid(0) != os.getpid() and os.getsid(os.getppid()) == os.getsid(0)
    except OSError:
        return False
