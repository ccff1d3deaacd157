"""Clients in processes that gevent or eventlet has patched, where every thread is a greenlet."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator

import psycopg
import pytest

import dblock
from tests.support.machine import measured

pytestmark = pytest.mark.second_stage

PATCHES = {
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "gevent, late": "import dblock._runtime.socket_probe; from gevent import monkey; monkey.patch_all()",
    "eventlet": "import warnings; warnings.simplefilter('ignore'); import eventlet; eventlet.monkey_patch()",
}

BEGIN = "import sys, threading, time\nimport dblock\nclient = dblock.Client(sys.argv[1])\n"

Run = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture(params=PATCHES)
def run(request: pytest.FixtureRequest, dsn: str) -> Iterator[Run]:
    """Run a script in a patched process. `client` is its client."""
    library = request.param.partition(",")[0]
    # Not imported here: eventlet would warn of every fork of this process from then on.
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    begun: list[subprocess.Popen[str]] = []

    def run(script: str) -> subprocess.Popen[str]:
        before = f"{PATCHES[request.param]}\n{BEGIN}"
        process = subprocess.Popen(
            [sys.executable, "-c", before + script, dsn],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun.append(process)
        return process

    yield run
    for process in begun:
        process.kill()
        process.communicate()


HOLDS = """
lease = client.lock("a", ttl={ttl}).acquire()
while lease._state.presence is None:
    time.sleep(0.01)
print("held", flush=True)
until = time.monotonic() + {busy}
while time.monotonic() < until:
    sum(range(1000))
print(lease.remaining() > 0, lease.lost.reason, flush=True)
"""


def test_busy_greenlet_finds_out_that_its_session_has_ended(run: Run, owner: psycopg.Connection, dsn: str) -> None:
    holder = run(HOLDS.format(ttl=30, busy=3))
    assert holder.stdout
    assert holder.stdout.readline() == "held\n"
    owner.execute("SELECT pg_terminate_backend(session) FROM lock_presence")
    with dblock.Client(dsn) as other:
        other.lock("a").acquire(timeout=20).release()
    assert holder.stdout.readline() == "False unreachable\n", "two holders trusted their leases"


def test_busy_greenlet_keeps_a_lease_whose_session_lasts(run: Run) -> None:
    holder = run(HOLDS.format(ttl=30, busy=0.5))
    assert holder.communicate(timeout=20)[0] == "held\nTrue None\n"


def test_busy_greenlet_loses_its_lease_by_the_clock(run: Run) -> None:
    """The keep-alive is a greenlet too, so it cannot renew the lease."""
    holder = run(HOLDS.format(ttl=2.5, busy=2.6))
    assert holder.communicate(timeout=20)[0] in ("held\nFalse expired\n", "held\nFalse unreachable\n")


WORKS = """
ticks = [time.monotonic()]
def tick():
    while True:
        time.sleep(0.01)
        ticks.append(time.monotonic())
threading.Thread(target=tick, daemon=True).start()
lease = client.lock("a", ttl=6).acquire()
first_end = time.monotonic() + lease.remaining()
while not lease.lost.is_set() and time.monotonic() + lease.remaining() < first_end + 1:
    time.sleep(0.05)
print("renewed", not lease.lost.is_set())
def wait():
    with dblock.Client(sys.argv[1]) as other:
        began = time.monotonic()
        with other.lock("a", timeout=10):
            print("granted", time.monotonic() - began)
waiter = threading.Thread(target=wait)
waiter.start()
time.sleep(0.5)
print("released", lease.release())
waiter.join()
lost = []
unkept = client.lock("b", ttl=0.3, keep_alive=False).acquire()
unkept.on_lost(lost.append)
until = time.monotonic() + 10
while not lost and time.monotonic() < until:
    time.sleep(0.05)
time.sleep(0.1)
print("called", len(lost))
began = time.monotonic()
client.close()
print("closed", time.monotonic() - began)
print("stalled", max(b - a for a, b in zip(ticks, ticks[1:])))
"""


@pytest.mark.alone
def test_client_works_and_stalls_no_other_greenlet(run: Run) -> None:
    with measured() as lateness:
        out, err = run(WORKS).communicate(timeout=30)
        printed = dict(line.split() for line in out.splitlines())
        assert (printed["renewed"], printed["released"], printed["called"]) == ("True", "True", "1"), err
        assert 0.3 - lateness() < float(printed["granted"]) < 1.3 + lateness()
        assert float(printed["closed"]) < 1 + lateness()
        assert float(printed["stalled"]) < 0.5 + lateness()


SHARES = """
lock = client.lock("a", reentrant=True)
done = threading.Event()
seen = {}
def other():
    seen["other"] = lock.try_acquire()
    try:
        dblock.assert_locked("a")
        seen["locked"] = True
    except dblock.NotLocked:
        seen["locked"] = False
    done.set()
with lock as outer:
    threading.Thread(target=other).start()
    done.wait(10)
    with lock as inner:
        dblock.assert_locked("a")
        print("same", inner.token == outer.token)
    print("held", outer.remaining() > 0)
print("other", seen["other"])
print("locked", seen["locked"])
print("free", client.lock("a").holder())
client.close()
"""


def test_greenlet_shares_a_reentrant_lock_with_itself_alone(run: Run) -> None:
    """All greenlets run in one thread."""
    out, err = run(SHARES).communicate(timeout=30)
    assert dict(line.split() for line in out.splitlines()) == {
        "same": "True", "held": "True", "other": "None", "locked": "False", "free": "None"
    }, err  # fmt: skip


PATCHED_LATE = """
import dblock._runtime.owners
before = dblock._runtime.owners.caller()
from gevent import monkey; monkey.patch_all()
import gevent
owners = [gevent.spawn(dblock._runtime.owners.caller) for _ in range(2)]
gevent.joinall(owners)
print(len({before, *(owner.value for owner in owners), dblock._runtime.owners.caller()}))
"""


def test_greenlets_are_told_apart_though_the_patch_came_late() -> None:
    pytest.importorskip("greenlet")
    if importlib.util.find_spec("gevent") is None:
        pytest.skip("gevent is not installed")
    done = subprocess.run([sys.executable, "-c", PATCHED_LATE], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "4\n", done.stderr
