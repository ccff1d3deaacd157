"""A fork while another thread opens a connection over TCP with a password."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
    for step in range(40):
        command = [sys.executable, "-W", "ignore", "-c", FORK, tcp_dsn, str(step * 0.0005)]
        done = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
