"""Stop the server of a test run, and remove its folder, as soon as no process of the run is left.

Run as a program of its own, with the folder as its only argument. Every process of the run has the pipe FOLDER/users
open. The kernel closes it when a process ends, however it ends, so this program needs no help from a run that was
interrupted or killed. It imports nothing of dblock, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import sys
import time

STOPS_WITHIN = 10.0


def main(folder: str) -> None:
    """Wait until all processes have closed the pipe, then stop the server and remove the folder."""
    pipe = os.open(os.path.join(folder, "users"), os.O_RDONLY | os.O_NONBLOCK)
    # The process that starts this program has the pipe open already, so an end of file means that all have ended.
    while True:
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        poll.poll()
        with open(os.path.join(folder, "guard"), "ab") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            # A process may have opened the pipe between the end of file and the lock.
            if _has_users(pipe):
                continue
            _stop(folder)
            _remove(folder)
            return


def _has_users(pipe: int) -> bool:
    try:
        return os.read(pipe, 1) != b""
    except BlockingIOError:
        return True


def _stop(folder: str) -> None:
    pid_file = os.path.join(folder, "data", "postmaster.pid")
    try:
        with open(pid_file) as file:
            pid = int(file.readline())
        # Without a checkpoint: the data is removed next.
        os.kill(pid, signal.SIGQUIT)
        until = time.monotonic() + STOPS_WITHIN
        # The server removes the file when it ends. Its process may stay on as a zombie if no other process reaps it.
        while os.path.exists(pid_file):
            os.kill(pid, 0)
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.01)
    except (OSError, ValueError):
        return  # it has not been started, or has ended


def _remove(folder: str) -> None:
    """Remove the folder, and what an initdb that was interrupted still writes into it."""
    until = time.monotonic() + STOPS_WITHIN
    # The guard stays until the end, because a new process may lock it and use the folder once it is free.
    while (left := [name for name in os.listdir(folder) if name != "guard"]) and time.monotonic() < until:
        for path in [os.path.join(folder, name) for name in left]:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(FileNotFoundError):  # an initdb cleans up after itself too
                    os.unlink(path)
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
