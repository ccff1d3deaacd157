"""The pytest plugin, as a user's project runs it: clients on a private database, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dblock.testing import guardian
from dblock.testing.shared_server import new_folder
from tests.support.eventually import eventually
from tests.support.inner_pytest import INI, PLUGIN, Result, command, environment, run_pytest
from tests.support.machine import measured

pytestmark = [pytest.mark.second_stage]

FOLDERS = new_folder().parent

TESTS = """
import os
import signal
import subprocess
import sys
import threading

import dblock
import pytest

kept = []


def test_lock_is_granted(dblock_client):
    with dblock_client.lock("a") as lease:
        assert lease.token


def test_rows_of_the_last_test_are_gone(dblock_client, dblock_dsn, dblock_schema):
    import psycopg

    with psycopg.connect(dblock_dsn) as connection:
        count = f"SELECT count(*) FROM {dblock_schema}.distributed_locks"
        assert connection.execute(count).fetchone() == (0,)


def test_held_lock(dblock_client):
    kept.append(dblock_client.lock("a").acquire())  # line of test_held_lock


def test_held_share(dblock_client):
    kept.append(dblock_client.read_lock("shared").acquire())  # line of test_held_share


def test_ticket(dblock_client):
    holder = dblock_client.lock("a").acquire()
    waits = threading.Event()

    def wait():
        waits.set()
        try:
            dblock_client.lock("a").acquire()  # line of test_ticket
        except dblock.DblockError:
            pass

    thread = threading.Thread(target=wait)
    thread.start()
    kept.append(thread)
    waits.wait()
    while not dblock_client.lock("a").queue():
        pass
    kept.append(holder)


def test_open_client(dblock_dsn, dblock_schema):
    client = dblock.Client(dblock_dsn, schema=dblock_schema)  # line of test_open_client
    kept.append(client)
    with client.lock("b"):
        pass


def test_closed_client(dblock_dsn, dblock_schema):
    with dblock.Client(dblock_dsn, schema=dblock_schema) as client, client.lock("b"):
        pass


def test_other_process(dblock_dsn, dblock_schema):
    script = "import dblock, os, sys; c = dblock.Client(sys.argv[1], schema=sys.argv[2], holder='other');"
    script += "kept = c.lock('theirs').acquire(); os._exit(0)"
    subprocess.run([sys.executable, "-c", script, dblock_dsn, dblock_schema], check=True)


@pytest.fixture
def held(dblock_client):
    with dblock_client.lock("fixture") as lease:
        yield lease


def test_lock_of_a_fixture(held):
    assert held.token


@pytest.mark.asyncio
async def test_asyncio(dblock_async_client):
    async with dblock_async_client.lock("x") as lease:
        assert lease.token


@pytest.mark.asyncio
async def test_asyncio_held_lock(dblock_async_client):
    kept.append(await dblock_async_client.lock("x").acquire())  # line of test_asyncio_held_lock


@pytest.mark.asyncio(loop_scope="module")
async def test_loop_that_stays_open(dblock_async_client):
    async with dblock_async_client.lock("x") as lease:
        assert lease.token


backends = []


@pytest.mark.asyncio
@pytest.mark.parametrize("time", range(8))  # psycopg treats a statement in another way after its fifth use
async def test_connection(dblock_async_client, time):
    async with dblock_async_client.lock("x"):
        pass
    (idle,) = dblock_async_client._runtime.runner._pool._idle
    backends.append(idle.connection.info.backend_pid)


@pytest.mark.asyncio
async def test_connection_after_an_end_of_sessions(dblock_async_client, dblock_dsn):
    import psycopg

    assert len(backends) == 8 and len(set(backends)) == 1
    with psycopg.connect(dblock_dsn) as connection:
        connection.execute("SELECT pg_terminate_backend(%s, 10000)", [backends[-1]])
    async with dblock_async_client.lock("x"):
        pass
    (idle,) = dblock_async_client._runtime.runner._pool._idle
    backends.append(idle.connection.info.backend_pid)
    assert backends[-1] != backends[0]


@pytest.fixture
def session_that_ends_late():
    os.kill(backends[-1], signal.SIGSTOP)
    timer = threading.Timer(0.5, os.kill, (backends[-1], signal.SIGCONT))
    timer.start()
    yield
    timer.join()


@pytest.mark.asyncio
async def test_connection_after_chaos(session_that_ends_late, chaos, dblock_async_client):
    assert chaos.kill_backend() == 0
    async with dblock_async_client.lock("x"):
        pass
    (idle,) = dblock_async_client._runtime.runner._pool._idle
    assert idle.connection.info.backend_pid not in backends
    chaos.slow(1)


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.anyio
async def test_anyio(dblock_async_client):
    async with dblock_async_client.lock("x") as lease:
        assert lease.token


@pytest.mark.anyio
async def test_anyio_held_lock(dblock_async_client):
    kept.append(await dblock_async_client.lock("x").acquire())  # line of test_anyio_held_lock


def test_assert_locked(dblock_client):
    with dblock_client.lock("mine"):  # line of test_assert_locked
        pass
    dblock.assert_locked("mine")


def test_assert_locked_without_a_grant(dblock_client):
    dblock.assert_locked("mine")


def test_chaos_is_undone_before_the_client_is_closed(chaos, dblock_client):
    from dblock.testing import assert_order

    with dblock_client.lock("a") as lease:
        chaos.freeze(lease)
        chaos.steal("b")
        chaos.deny("53300")
        chaos.allow()
    chaos.deny("53300")
    assert_order(["a", "b"])


@pytest.fixture
def own_client(dblock_dsn, dblock_schema):
    with dblock.Client(dblock_dsn, schema=dblock_schema) as client:
        yield client


def test_chaos_is_undone_before_a_fixture_of_the_user_ends(chaos, own_client):
    kept.append(own_client.lock("a").acquire())  # released when the client is closed
    chaos.deny("53300")


def test_chaos_reaches_the_client(chaos, dblock_client):
    with dblock_client.lock("a"):
        pass
    assert chaos.kill_backend() >= 1
    with dblock_client.lock("a", timeout=10):
        pass


def test_client_that_the_test_closes(dblock_client):
    with dblock_client, dblock_client.lock("a"):
        pass


def test_client_after_all_these(dblock_client):
    with dblock_client.lock("a"):
        pass
"""


def line_of(test: str) -> str:
    numbers = [number for number, line in enumerate(TESTS.splitlines(), 1) if line.endswith(f"# line of {test}")]
    return f"test_locks.py:{numbers[0]}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Run all of these tests once."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_locks.py").write_text(TESTS)
    return run_pytest(folder)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "test_locks.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(INI)
    return tmp_path


@pytest.mark.parametrize(
    "test",
    [
        "test_lock_is_granted",
        "test_rows_of_the_last_test_are_gone",
        "test_closed_client",
        "test_lock_of_a_fixture",
        "test_asyncio",
        "test_loop_that_stays_open",
        "test_connection[7]",
        "test_connection_after_an_end_of_sessions",
        "test_connection_after_chaos",
        "test_anyio",
        "test_chaos_is_undone_before_the_client_is_closed",
        "test_chaos_is_undone_before_a_fixture_of_the_user_ends",
        "test_chaos_reaches_the_client",
        "test_client_that_the_test_closes",
        "test_client_after_all_these",
    ],
)
def test_fixtures_serve_a_test_that_leaves_nothing(run: Result, test: str) -> None:
    assert run.outcome(test) == "PASSED", run.output


@pytest.mark.parametrize(
    ("test", "says"),
    [
        ("test_held_lock", r"lock 'a' \(token \d+\), held by .+: acquired at {line} in test_held_lock"),
        ("test_held_share", r"lock 'shared' \(token \d+\), held by .+: acquired at {line} in test_held_share"),
        ("test_ticket", "a ticket in the queue for 'a': .+ waits at {line} in wait"),
        ("test_open_client", "a client with its connections and threads, not closed: made at {line} in"),
        ("test_asyncio_held_lock", r"lock 'x' \(token \d+\), held by .+: acquired at {line} in"),
        ("test_anyio_held_lock", r"lock 'x' \(token \d+\), held by .+: acquired at {line} in"),
    ],
)
def test_leak_fails_its_test_and_names_the_line(run: Result, test: str, says: str) -> None:
    assert run.outcome(test) == "ERROR", run.output
    assert re.search(says.format(line=re.escape(line_of(test))), run.said_of(test)), run.said_of(test)


def test_lock_that_is_not_held_is_reported_with_its_grants(run: Result) -> None:
    said = run.said_of("test_assert_locked")
    expected = rf"granted to:\nE\s+.+ pid \d+: 'mine', token \d+, acquired at {line_of('test_assert_locked')} in"
    assert re.search(expected, said), run.output
    assert "the lock was not granted." in run.said_of("test_assert_locked_without_a_grant")


def test_lock_that_another_process_has_left_is_reported(run: Result) -> None:
    said = run.said_of("test_other_process")
    assert re.search(r"lock 'theirs' \(token \d+\), held by other: acquired in another process", said), run.output


def test_server_is_gone_after_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_locks.py").write_text(
        "import pathlib\n"
        "def test_lock(dblock_client, dblock_dsn):\n"
        "    with dblock_client.lock('a'):\n"
        "        pathlib.Path('begun').write_text(dblock_dsn)\n"
    )
    done = run_pytest(tmp_path)
    assert done.code == 0, done.output
    (name,) = set(re.findall(r"dblock-pytest-\w+", (tmp_path / "begun").read_text()))
    assert not (FOLDERS / name).exists()
    gone_within(5, name)


def gone_within(seconds: float, name: str) -> None:
    """Fail if the folder of a run, its server or its guardian stays."""
    eventually(
        lambda: not (FOLDERS / name).exists() and not processes_of(name), lambda: f"{processes_of(name)} end", seconds
    )


def processes_of(name: str) -> list[str]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                found.append(Path(f"/proc/{entry}/cmdline").read_text())
    return [words for words in found if name in words]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_server_is_gone_after_an_interrupted_run(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "test_locks.py").write_text(
        "import pathlib, time\n"
        "def test_long(dblock_client, dblock_dsn):\n"
        "    with dblock_client.lock('a'):\n"
        "        pathlib.Path('begun').write_text(dblock_dsn)\n"
        "        time.sleep(60)\n"
    )
    process = subprocess.Popen(
        command(), cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    begun = tmp_path / "begun"
    eventually(lambda: process.poll() is not None or (begun.exists() and begun.read_text()), "the run begins")
    assert process.poll() is None
    (name,) = set(re.findall(r"dblock-pytest-\w+", begun.read_text()))
    assert (FOLDERS / name).exists()
    process.send_signal(number)
    process.wait(30)
    gone_within(20, name)


def test_processes_of_one_run_share_a_server_and_do_not_collide(tmp_path: Path) -> None:
    (tmp_path / "test_locks.py").write_text(
        "import pathlib, re, pytest\n"
        "@pytest.mark.parametrize('n', range(40))\n"
        "def test_many(dblock_client, dblock_dsn, worker_id, n):\n"
        "    with dblock_client.lock('the same', timeout=0):\n"
        "        pathlib.Path(f'{worker_id}-{n}').write_text(dblock_dsn)\n"
    )
    # Other runs have folders at the same time.
    (tmp_path / "conftest.py").write_text(
        "from dblock.testing import shared_server\n"
        "original = shared_server.new_folder\n"
        "def noted():\n"
        "    folder = original()\n"
        "    with open('made', 'a') as file:\n"
        "        file.write(f'{folder.name} ')\n"
        "    return folder\n"
        "shared_server.new_folder = noted\n"
    )
    done = run_pytest(tmp_path, "-n", "8")
    assert done.code == 0, done.output
    dsns = {path.read_text() for path in tmp_path.glob("gw*-*")}
    workers = {path.name.split("-")[0] for path in tmp_path.glob("gw*-*")}
    assert len(dsns) == len(workers) > 1
    (used,) = set(re.findall(r"dblock-pytest-\w+", " ".join(dsns)))
    made = (tmp_path / "made").read_text().split()
    assert used in made
    assert [name for name in made if (FOLDERS / name).exists()] == []


def test_plugin_that_is_turned_off_has_no_fixtures(project: Path) -> None:
    done = run_pytest(project, "-p", "no:dblock", "-p", f"no:{PLUGIN}", "-k", "granted")
    assert "fixture 'dblock_client' not found" in done.output


def test_plugin_imports_little_before_a_fixture_is_used() -> None:
    script = (
        f"import pytest, sys; before = set(sys.modules); import {PLUGIN}; print(*sorted(set(sys.modules) - before))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    heavy = ("psycopg", "sqlalchemy", "alembic", "asyncio", "dblock.client", "dblock.embedded", "dblock.admin")
    assert not [name for name in shown if name.startswith(heavy)]


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_first_use_takes_two_seconds_and_each_test_20_ms(tmp_path: Path, kind: str) -> None:
    body = {
        "sync": "def test_many(dblock_client, n):\n    with dblock_client.lock('a'): pass\n",
        "async": "@pytest.mark.asyncio\n"
        "async def test_many(dblock_async_client, n):\n    async with dblock_async_client.lock('a'): pass\n",
    }
    (tmp_path / "test_locks.py").write_text(f"import pytest\n@pytest.mark.parametrize('n', range(60))\n{body[kind]}")
    (tmp_path / "conftest.py").write_text(
        "import time, pathlib, pytest\n"
        "took = []\n"
        "@pytest.hookimpl(wrapper=True)\n"
        "def pytest_runtest_setup(item):\n"
        "    began = time.monotonic()\n"
        "    yield\n"
        "    took.append(time.monotonic() - began)\n"
        "@pytest.hookimpl(wrapper=True)\n"
        "def pytest_runtest_protocol(item):\n"
        "    began = time.monotonic()\n"
        "    result = yield\n"
        "    took.append(time.monotonic() - began)\n"
        "    return result\n"
        "def pytest_unconfigure():\n"
        "    pathlib.Path('took').write_text(' '.join(map(str, took)))\n"
    )
    firsts, middles, lates = [], [], []
    for _ in range(3):  # the fastest run shows what the plugin takes, the others also what the machine does
        with measured() as lateness:
            done = run_pytest(tmp_path)
            lates.append(lateness())
        assert done.code == 0, done.output
        took = [float(word) for word in (tmp_path / "took").read_text().split()]
        tests = sorted(took[3::2])
        firsts.append(took[0])
        middles.append(tests[len(tests) // 2])
    assert min(firsts) < 2 + min(lates), f"the first use took {min(firsts):.2f} s"
    assert min(middles) < 0.020 + min(lates), f"a test took {1000 * min(middles):.1f} ms"


def test_guardian_removes_what_an_interrupted_initdb_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    removed: list[str] = []
    making = folder / "making-1"
    making.mkdir(parents=True)
    (folder / "guard").touch()
    os.mkfifo(folder / "users")
    remove = shutil.rmtree

    def rmtree(path: str, **options: Any) -> None:
        remove(path, **options)
        if not removed:
            (making / "late").mkdir(parents=True)
        removed.append(path)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    user = os.open(folder / "users", os.O_RDWR | os.O_NONBLOCK)
    ending = threading.Timer(0.2, os.close, [user])  # the guardian has opened the pipe by then, or sees no user
    ending.start()
    guardian.main(str(folder))
    ending.join()
    assert not folder.exists()


def test_guardian_removes_the_rest_if_a_file_has_gone_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ready").touch()
    names = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: ["gone", *names(folder)] if names(folder) else [])
    guardian._remove(str(tmp_path))
    assert not tmp_path.exists()


def test_guide_holds_tests_that_pass(tmp_path: Path) -> None:
    guide = Path(__file__).parents[3] / "docs" / "guides" / "testing.md"
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
    (tmp_path / "test_guide.py").write_text("\n\n".join(blocks))
    done = run_pytest(tmp_path)
    assert done.code == 0, done.output
    assert done.outcome("test_withdrawal_is_fenced") == "PASSED"
