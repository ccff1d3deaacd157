"""A fork while another thread opens a connection."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import pytest

import dblock
from dblock._runtime.listener_connection import ListenerConnection
from dblock._runtime.target import Target
from tests.support.eventually import eventually

FORK = """
import os, sys, threading, time
import dblock
import dblock._runtime.runner
client = dblock.Client(sys.argv[1])
opens = threading.Thread(target=client.lock("a").holder)
opens.start()
until = time.perf_counter() + float(sys.argv[2])
while time.perf_counter() < until:
    time.sleep(0)
child = os.fork()
if child == 0:
    client.lock("a").holder()
    os._exit(0)
opens.join()
deadline = time.monotonic() + 10
while not os.waitpid(child, os.WNOHANG)[0]:
    if time.monotonic() > deadline:
        os.kill(child, 9)
        sys.exit("the child hangs")
    time.sleep(0.01)
"""


@pytest.mark.second_stage
@pytest.mark.timeout(300)
def test_fork_at_any_moment_of_the_first_connection_does_not_hang_the_child(tcp_dsn: str) -> None:
    """libpq and OpenSSL hold locks of their own then. Without protection, one child in seven hung."""
    for step in range(20):
        command = [sys.executable, "-W", "ignore", "-c", FORK, tcp_dsn, str(step * 0.001)]
        done = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def sockets_of(process: int) -> set[str]:
    folder = f"/proc/{process}/fd"
    return {os.readlink(f"{folder}/{number}") for number in os.listdir(folder) if number.isdigit()}


@pytest.mark.second_stage
@pytest.mark.usefixtures("needs_presence")
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system does not list open files")
@pytest.mark.parametrize(("kind", "step"), [(Target, "connect"), (ListenerConnection, "is_direct")])
def test_child_of_a_fork_while_the_listener_connects_does_not_have_its_socket(
    dsn: str, monkeypatch: pytest.MonkeyPatch, kind: Any, step: str
) -> None:
    """With a copy of the socket, the child would keep the presence of a parent that was killed."""
    reached, forked = threading.Event(), threading.Event()
    original = getattr(kind, step)

    def held(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        if threading.current_thread().name == "dblock connecting":
            reached.set()
            assert forked.wait(10)
        return result

    monkeypatch.setattr(kind, step, held)
    with dblock.Client(dsn) as client, client.lock("a") as lease:
        assert reached.wait(10)
        runs, says = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            os.write(says, b"!")
            time.sleep(20)
            os._exit(0)
        try:
            assert os.read(runs, 1) == b"!"
            forked.set()
            eventually(lambda: lease._state.presence, "the lease has its presence")
            connection: Any = client._runtime.listener.flow.connection
            number = connection.connection.pgconn.socket
            assert os.readlink(f"/proc/self/fd/{number}") not in sockets_of(child)
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)
            os.close(runs)
            os.close(says)
