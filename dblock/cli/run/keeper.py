"""The keeper: the process that starts the command and ends it in time.

Guarantee: as long as the keeper runs at all, everything that it has started is gone by the deadline that it was given,
and it reports so only when that is true. It knows nothing of locks. It has no database connection, no threads, and no
children but the command's. The supervisor sends it the deadline again and again. If no later deadline arrives in time,
because the supervisor was stopped or killed, the keeper ends the command by itself: it sends SIGTERM `grace` and
`margin` seconds before the deadline, and SIGKILL `margin` seconds before it.

On Linux the keeper adopts every process that the command leaves behind, in whatever group or session. The kernel then
says when nothing is left: the keeper has no children any more. Elsewhere only the command's process group can be
seen. If the keeper itself is killed, the kernel kills the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from dblock._core import clock
from dblock.cli.run import process_tree
from dblock.cli.run.terminal import controlling_terminal

SIGNALS = [
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP,
    signal.SIGTTIN, signal.SIGTTOU,
]  # fmt: skip
"""Signals that the keeper ignores: the supervisor forwards them over the pipe."""

TICK = 0.02
"""Seconds between two checks of the deadline, so that a keeper that was frozen notices soon."""

STUCK_AFTER = 5.0
"""Seconds after which the keeper gives up on a process that it cannot kill: one of another user, or in the kernel."""


class Keeper:
    """The keeper's side of the two pipes."""

    def __init__(
        self, commands_fd: int, reports_fd: int, dispositions: Mapping[int, Any], error_fd: int | None = None
    ) -> None:
        self._commands_fd, self._reports_fd = commands_fd, reports_fd
        self._error_fd = error_fd
        """The command's standard error, if it is not the keeper's."""
        self._dispositions = dispositions
        self._inbox = b""
        self._outbox = b""
        self._pid = 0
        self._code: int | None = None
        self._deadline = float("inf")
        self._grace = self._margin = 0.0
        self._kill_at: float | None = None
        self._ended_for_lease = False
        """Whether the command was ended because its deadline came."""
        self._killing_since: float | None = None
        self._parent_stopped = False
        """Whether the supervisor has stopped because the command has."""

    def serve(self) -> None:
        """Execute the supervisor's commands until nothing is left to do."""
        wake_reader, wake_writer = os.pipe()
        for fd in (wake_reader, wake_writer):
            os.set_blocking(fd, False)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        process_tree.become_subreaper()
        # The supervisor may be frozen. Waiting for it to read must not keep the keeper from the deadline.
        os.set_blocking(self._reports_fd, False)
        while self._commands_fd >= 0 or self._pid:
            self._flush_reports()
            fds = [wake_reader] if self._commands_fd < 0 else [wake_reader, self._commands_fd]
            ready = process_tree.wait_readable(fds, TICK if self._pid else None)
            if wake_reader in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_reader, 4096)
            # The deadline comes first: the pipe may hold a command to continue.
            self._enforce_deadline()
            if self._commands_fd in ready:
                self._read_commands()
            if self._pid and self._reap():
                break
        self._report(gone=True, for_lease=self._ended_for_lease)
        os.set_blocking(self._reports_fd, True)
        self._flush_reports()

    def _read_commands(self) -> None:
        part = os.read(self._commands_fd, 65536)
        if not part:
            # The supervisor is gone.
            self._commands_fd = -1
            self._deadline = 0.0
            self._enforce_deadline()
            return
        *lines, self._inbox = (self._inbox + part).split(b"\n")
        for line in lines:
            self._handle(json.loads(line))

    def _handle(self, command: dict[str, Any]) -> None:
        self._deadline = command.get("deadline", self._deadline)
        self._parent_stopped = "stops" in command
        if "start" in command:
            self._start(command)
        elif "signal" in command:
            self._forward_signal(command["signal"])
        elif "end" in command:
            self._terminate(self._deadline - clock.now())
        elif "continue" in command:
            self._continue(command["continue"])

    def _start(self, command: dict[str, Any]) -> None:
        self._grace, self._margin = command["grace"], command["margin"]
        foreground = command["foreground"]

        def prepare() -> None:
            # The command gets its own group, to be signalled as one, and the terminal before it can ask for it.
            os.setpgid(0, 0)
            terminal = controlling_terminal() if foreground else None
            if terminal is not None:
                terminal.set_foreground(os.getpid())
            for number, disposition in self._dispositions.items():
                signal.signal(number, disposition)
            process_tree.die_with_parent()
            if self._deadline_passed():
                raise TimeoutError

        if self._deadline_passed():
            self._refuse_start()
            return
        try:
            # The command inherits the files that a shell has opened for it. The keeper has no threads, so it may fork.
            started = subprocess.Popen(
                command["start"],
                env=command["environment"],
                stderr=self._error_fd,
                close_fds=False,
                preexec_fn=prepare,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            if self._deadline_passed():
                self._refuse_start()
                return
            self._report(failed=getattr(error, "errno", None) or 0, why=str(error))
            return
        self._pid = started.pid
        started.returncode = 0  # `_reap` waits for it, together with all other processes
        self._report(pid=self._pid)
        if self._error_fd is not None:
            os.close(self._error_fd)  # its reader sees the end when the last process of the command has ended
        self._enforce_deadline()

    def _deadline_passed(self) -> bool:
        return clock.now() >= self._deadline - self._margin

    def _refuse_start(self) -> None:
        """Start nothing, because no time is left for the command."""
        self._ended_for_lease = True
        self._commands_fd = -1

    def _enforce_deadline(self) -> None:
        """Terminate the command, or kill it, if its deadline is near."""
        if not self._pid:
            return
        left = self._deadline - clock.now()
        if left <= self._grace + self._margin and self._kill_at is None:
            self._terminate(left)
        if self._kill_at is not None and (clock.now() >= self._kill_at or left <= self._margin):
            self._ended_for_lease = self._ended_for_lease or left <= self._margin
            self._kill()

    def _terminate(self, left: float) -> None:
        if self._kill_at is not None or not self._pid:
            return
        self._ended_for_lease = True
        self._kill_at = clock.now() + min(self._grace, max(left - self._margin, 0.0))
        if self._kill_at > clock.now():
            # Only with time to spare. A stopped command must continue to be able to end.
            self._send(signal.SIGTERM, signal.SIGCONT)

    def _kill(self) -> None:
        # First the processes that are quickly found; a process that was left out is found by the scan at the next tick.
        find = process_tree.descendants if self._killing_since is None else process_tree.scan_descendants
        self._killing_since = self._killing_since or clock.now()
        self._send(signal.SIGKILL, find=find)

    def _send(self, *numbers: int, find: Callable[[], dict[int, int]] = process_tree.descendants) -> None:
        for number in numbers:
            process_tree.signal_group(self._pid, number)
        for pid, group in find().items():
            if group != self._pid:  # its own group has the signal already, and a second one may be too much
                for number in numbers:
                    process_tree.send_signal(pid, number)

    def _forward_signal(self, number: int) -> None:
        if self._pid:
            process_tree.signal_group(self._pid, number)
            if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT) and self._kill_at is None:
                process_tree.signal_group(self._pid, signal.SIGCONT)

    def _continue(self, foreground: bool) -> None:
        if self._kill_at is None and self._pid:
            terminal = controlling_terminal() if foreground else None
            if terminal is not None:
                terminal.set_foreground(self._pid)
            process_tree.signal_group(self._pid, signal.SIGCONT)

    def _reap(self) -> bool:
        """Collect the processes that have ended or stopped; return whether nothing is left to wait for."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                # Outside Linux the processes that the command left in its group are not our children.
                if sys.platform != "linux" and process_tree.signal_group(self._pid, 0):
                    break
                return True
            if pid == 0:
                break
            if pid == self._pid and os.WIFSTOPPED(status):
                if not self._outbox:
                    self._report(stopped=os.WSTOPSIG(status))
            elif pid == self._pid and os.WIFCONTINUED(status):
                # Another process may have continued the command; a supervisor that stopped with it continues with it.
                if self._parent_stopped:
                    process_tree.send_signal(os.getppid(), signal.SIGCONT)
            elif pid == self._pid:
                code = os.waitstatus_to_exitcode(status)
                self._code = code if code >= 0 else 128 - code
                self._report(code=self._code, for_lease=self._ended_for_lease)
        if self._code is not None:
            self._terminate_leftovers()
        return self._is_stuck()

    def _terminate_leftovers(self) -> None:
        """Terminate the processes that the command left running, then kill them; kill fast forkers at every tick."""
        if self._kill_at is None:
            self._kill_at = clock.now() + self._grace
            self._send(signal.SIGTERM, signal.SIGCONT)
        elif self._killing_since is not None:
            for pid in process_tree.children():
                process_tree.send_signal(pid, signal.SIGKILL)

    def _is_stuck(self) -> bool:
        if self._killing_since is None or clock.now() < self._killing_since + STUCK_AFTER:
            return False
        self._report(stuck=list(process_tree.descendants()) or [self._pid])
        return True

    def _report(self, **report: Any) -> None:
        self._outbox += json.dumps(report).encode() + b"\n"
        self._flush_reports()

    def _flush_reports(self) -> None:
        """Write the pending reports, as far as the pipe has room."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._outbox:
                self._outbox = self._outbox[os.write(self._reports_fd, self._outbox) :]


def fork_keeper(error_fd: int | None = None) -> tuple[int, int, int]:
    """Fork a keeper, before this process has threads; return its pid, the commands pipe and the reports pipe.

    `error_fd` is what the command gets as its standard error.
    """
    commands_reader, commands_writer = os.pipe()
    reports_reader, reports_writer = os.pipe()
    dispositions: dict[int, Any] = {
        number: signal.SIG_IGN if signal.getsignal(number) == signal.SIG_IGN else signal.SIG_DFL
        for number in (*SIGNALS, signal.SIGCHLD)
    }
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # while it is ignored, no child can be waited for
    pid = os.fork()
    if pid == 0:
        try:
            os.close(commands_writer)
            os.close(reports_reader)
            # Out of reach of signals to our group, but in the same session: the command needs its terminal.
            os.setpgid(0, 0)
            Keeper(commands_reader, reports_writer, dispositions, error_fd).serve()
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(2, f"dblock: the keeper failed: {type(error).__name__}: {error}\n".encode())
        finally:
            sys.stdout = sys.stderr = None  # their buffers belong to the parent process
            os._exit(0)
    os.close(commands_reader)
    os.close(reports_writer)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    return pid, commands_writer, reports_reader
