"""Threads that the process may not start for a moment, or whose start is interrupted: no lock is left behind.

The next call starts the thread, and no thread runs twice.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import dblock
from dblock._runtime.threads import start_thread
from tests.support.eventually import eventually

Fail = Callable[..., None]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Let the next starts of threads with this name fail, as when the process may have no more of them."""
    start = threading.Thread.start

    def plan(name: str, times: int = 1) -> None:
        left = times

        def limited(self: threading.Thread) -> None:
            nonlocal left
            if left > 0 and self.name.startswith(name):
                left -= 1
                raise RuntimeError("can't start new thread")
            start(self)

        monkeypatch.setattr(threading.Thread, "start", limited)

    return plan


@pytest.mark.parametrize("interrupt", [TimeoutError, KeyboardInterrupt])
def test_interrupt_comes_out_of_the_start_of_a_thread_that_has_begun(
    monkeypatch: pytest.MonkeyPatch, interrupt: type[BaseException]
) -> None:
    name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    begin, runs, over = getattr(threading, name), threading.Event(), threading.Event()

    def begin_and_interrupt(*args: Any, **options: Any) -> None:
        begin(*args, **options)
        runs.wait()
        raise interrupt

    def run() -> None:
        runs.set()
        over.wait()

    with monkeypatch.context() as patch:
        patch.setattr(threading, name, begin_and_interrupt)
        with pytest.raises(interrupt):
            start_thread("interrupted", run)
    over.set()


def is_held(owner: psycopg.Connection[Any], name: str) -> bool:
    return owner.execute("SELECT 1 FROM holder(%s)", (name,)).fetchone() is not None


@pytest.mark.parametrize("thread", ["dblock keep-alive", "dblock listener"])
@pytest.mark.parametrize("method", ["try_acquire", "acquire"])
def test_grant_is_released_when_a_thread_cannot_be_started(
    client: dblock.Client, owner: psycopg.Connection[Any], fail: Fail, thread: str, method: str
) -> None:
    fail(thread)
    with pytest.raises(dblock.Unavailable, match=r"could not start a thread.*process limit"):
        getattr(client.lock("a"), method)()
    assert not is_held(owner, "a")


def test_grant_is_released_when_no_file_can_be_opened(
    client: dblock.Client, owner: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    client.lock("a").holder()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", refuse)
        with pytest.raises(dblock.Unavailable, match=r"Too many open files.*ulimit -n"):
            client.lock("a").acquire()
    assert not is_held(owner, "a")
    client.lock("a").acquire().release()


@pytest.mark.second_stage
def test_keep_alive_is_started_again(client: dblock.Client, fail: Fail) -> None:
    fail("dblock keep-alive", times=2)
    for _ in range(2):
        with pytest.raises(dblock.Unavailable):
            client.lock("a").acquire()
    lease = client.lock("a", ttl=6).acquire()
    granted_until = lease.expires_at
    eventually(lambda: lease.expires_at > granted_until, "a renewal")
    assert lease.release(), "it was lost"


@pytest.mark.second_stage
def test_lease_without_presence_needs_no_listener(dsn: str, fail: Fail) -> None:
    fail("dblock listener")
    with dblock.Client(dsn, presence=None) as client:
        lease = client.lock("a", ttl=0.6).acquire()
        granted_until = lease.expires_at
        eventually(lambda: lease.expires_at > granted_until, "a renewal")
        assert lease.release(), "it was lost"


def listeners() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("dblock listener")}


@pytest.mark.second_stage
def test_listener_is_started_again(dsn: str, client: dblock.Client, fail: Fail) -> None:
    with dblock.Client(dsn, presence=None) as other:
        held = other.lock("a").acquire()
        fail("dblock listener", times=2)
        before = listeners()
        for _ in range(2):
            with pytest.raises(dblock.Unavailable):
                client.lock("a").acquire(timeout=20)
        threading.Timer(0.2, held.release).start()
        began = time.monotonic()
        client.lock("a").acquire(timeout=25).release()
        assert listeners() - before
    assert time.monotonic() - began < 10, "it waited for the end of the lease"


def test_failed_start_leaves_no_socket_open(client: dblock.Client, fail: Fail) -> None:
    client.lock("a").holder()
    fail("dblock listener", times=20)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(20):
        with pytest.raises(dblock.Unavailable):
            client.lock("a").acquire()
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 2


@pytest.mark.usefixtures("needs_presence")
def test_listener_connects_again_when_its_connecting_thread_could_not_start(
    client: dblock.Client, owner: psycopg.Connection[Any], fail: Fail
) -> None:
    fail("dblock connecting", times=2)
    lease = client.lock("a").acquire()
    eventually(lambda: owner.execute("SELECT 1 FROM lock_presence").fetchone(), "a presence")
    lease.release()


@pytest.mark.usefixtures("needs_presence")
def test_lost_presence_is_noticed_without_a_timer(
    client: dblock.Client, owner: psycopg.Connection[Any], fail: Fail
) -> None:
    lease = client.lock("a").acquire()
    eventually(lambda: owner.execute("SELECT 1 FROM lock_presence").fetchone(), "a presence")
    fail("dblock timer")
    ended = [session for (session,) in owner.execute("SELECT session FROM lock_presence").fetchall()]
    owner.execute("SELECT pg_terminate_backend(session) FROM lock_presence")
    # It connects again, with a new session, and registers that one.
    new = "SELECT 1 FROM lock_presence WHERE gone_since IS NULL AND session <> ALL (%s)"
    eventually(lambda: owner.execute(new, [ended]).fetchone(), "a presence that is registered again")
    assert lease.remaining() > 0, "the presence was withdrawn in time"
    lease.release()


@pytest.mark.second_stage
@pytest.mark.parametrize("times", [1, 3])
def test_callback_is_called_when_its_thread_could_not_start(client: dblock.Client, fail: Fail, times: int) -> None:
    lease = client.lock("a", ttl=0.3, keep_alive=False).acquire()
    called = threading.Event()
    lease.on_lost(lambda _: called.set())
    fail("dblock callback", times)
    assert called.wait(20)


def test_callbacks_thread_is_started_again(client: dblock.Client, fail: Fail) -> None:
    lease = client.lock("a", ttl=10, keep_alive=False).acquire()
    called = threading.Event()
    fail("dblock callbacks")
    with pytest.raises(dblock.Unavailable, match="could not start a thread"):
        lease.on_lost(lambda _: None)
    lease.on_danger(lambda _: called.set(), before=9.5)
    assert called.wait(20)


Interrupt = Callable[[str, bool], None]


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Interrupt:
    """Interrupt the next start of a thread with this name, as Ctrl-C does: once it runs, or while the system makes it.

    In the second case the thread comes to run while the next one starts.
    """
    start = threading.Thread.start

    def plan(name: str, runs: bool) -> None:
        late: list[threading.Thread] = []
        planned = True

        def interrupted(self: threading.Thread) -> None:
            nonlocal planned
            if planned and self.name == name:
                planned = False
                if runs:
                    start(self)
                else:
                    late.append(self)
                raise KeyboardInterrupt
            start(self)
            while late:
                start(late.pop())

        monkeypatch.setattr(threading.Thread, "start", interrupted)

    return plan


def running(name: str) -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == name}


@pytest.mark.second_stage
@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("thread", ["dblock keep-alive", "dblock listener"])
def test_interrupted_start_leads_to_one_thread(
    client: dblock.Client,
    owner: psycopg.Connection[Any],
    interrupt: Interrupt,
    caplog: pytest.LogCaptureFixture,
    thread: str,
    runs: bool,
) -> None:
    client.lock("a").holder()
    before = running(thread)
    interrupt(thread, runs)
    with pytest.raises(KeyboardInterrupt):
        client.lock("a").acquire()
    assert not is_held(owner, "a")
    lease = client.lock("a", ttl=3).acquire()
    granted_until = lease.expires_at
    eventually(lambda: lease.expires_at > granted_until, "a renewal")
    assert len(running(thread) - before) == 1
    assert lease.release(), "it was lost"
    assert not caplog.records


def test_interrupted_start_of_the_callbacks_leads_to_one_thread(client: dblock.Client, interrupt: Interrupt) -> None:
    lease = client.lock("a", ttl=10, keep_alive=False).acquire()
    before = running("dblock callbacks")
    interrupt("dblock callbacks", True)
    with pytest.raises(KeyboardInterrupt):
        lease.on_lost(lambda _: None)
    called: list[float] = []
    lease.on_danger(called.append, before=9.9)
    eventually(lambda: called, "the callback")
    assert len(running("dblock callbacks") - before) == 1
    lease.release()


LIMITED = """
import os, resource, sys, threading, time
import dblock
dsn = sys.argv[1]
with dblock.Client(dsn) as warm:  # imports all that is needed
    warm.lock("warm").acquire().release()
os.setgid(65534)
os.setuid(54321)
hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
client = dblock.Client(dsn)
for threads in (1, 2):
    resource.setrlimit(resource.RLIMIT_NPROC, (threads, hard))
    try:
        client.lock("first").acquire(timeout=2)
        print("granted")
    except dblock.Unavailable as error:
        print("refused", "process limit" in str(error), client.lock("first").holder())
    resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
lease = client.lock("second", ttl=3).acquire(timeout=20)
first = lease.expires_at
while lease.remaining() > 0 and (lease.expires_at - first).total_seconds() < 0.9:
    time.sleep(0.01)
print("kept", lease.remaining() > 0)
with dblock.Client(dsn) as other:
    held = other.lock("third").acquire()
    threading.Timer(0.3, held.release).start()
    began = time.monotonic()
    client.lock("third").acquire(timeout=10).release()
    print("woken", time.monotonic() - began < 2)
client.close()
"""


@pytest.mark.second_stage
@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can change to an account without processes"
)
def test_client_recovers_from_a_real_process_limit(tcp_dsn: str) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, tcp_dsn], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["refused True None", "refused True None", "kept True", "woken True"], done
