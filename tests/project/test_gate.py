"""The gate itself: the first stage refuses tests that depend on the machine, each test leaves nothing behind, and the
second stage judges no test during which the machine was late.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.databases import Databases
from tests.support.inner_pytest import Result, run_pytest
from tests.support.servers import private_server

ROOT = Path(__file__).parents[2]

CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
pytest_plugins = [
    "tests.support.stages", "tests.support.isolation", "tests.support.first_stage", "tests.support.judging",
]
"""


def run(folder: Path, tests: str, *options: str, conftest: str = CONFTEST) -> Result:
    """Run tests with the plugins of the gate."""
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_inner.py").write_text(tests)
    return run_pytest(folder, "-p", "no:randomly", *options)


DEPENDS = """
import os, signal, subprocess, sys
import dblock, pytest
from tests.support import machine
from tests.support.shell import Shell

def sleeper():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

def test_that_kills():
    with sleeper() as process:
        process.kill()

def test_that_freezes():
    with sleeper() as process:
        os.kill(process.pid, signal.SIGSTOP)
        process.terminate()
        os.kill(process.pid, signal.SIGCONT)

def test_that_forks():
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)

def test_that_measures():
    with machine.soon(60):
        pass

@pytest.mark.alone
def test_that_runs_alone():
    pass

def test_that_stays_calm():
    with sleeper() as process:
        process.terminate()

@pytest.mark.second_stage
def test_of_the_second_stage():
    with sleeper() as process:
        process.kill()

@pytest.fixture
def client():
    with dblock.Client(DSN) as client:
        yield client

def test_short_lease(client):
    with client.lock("a", ttl=9.5):
        pass

def test_short_renewal(client):
    with client.lock("a", ttl=60) as lease:
        lease.renew(9.5)

def test_short_run(client):
    client.once("job", every=3600, ttl=9.5)(lambda: 1)()

def test_long_lease(client):
    with client.lock("a", ttl=10):
        pass

def test_group_kill():
    with subprocess.Popen([sys.executable, "-c", ""], start_new_session=True) as process:
        os.killpg(process.pid, signal.SIGKILL)

@pytest.fixture
def no_program(monkeypatch):
    monkeypatch.setattr(Shell, "start", lambda shell, *arguments, **options: None)

@pytest.mark.parametrize("ttl", [["--ttl=9.5"], ["--ttl", "9.5s"]])
def test_program(no_program, ttl):
    Shell.start(None, "run", *ttl, "a", "--", "true", quiet=True)

def test_patience(client):
    assert client._runtime.flows.timings.give_up_within == 20

@pytest.mark.second_stage
def test_usual_patience(client):
    assert client._runtime.flows.timings.give_up_within == 2
"""


@pytest.mark.second_stage
def test_first_stage_refuses_tests_that_depend_on_the_machine(tmp_path: Path, dsn: str) -> None:
    done = run(tmp_path, DEPENDS.replace("DSN", repr(dsn)), "--stage", "all")
    outcomes = {
        "test_that_kills": "kills a process",
        "test_that_freezes": "freezes a process",
        "test_that_forks": "forks this process",
        "test_that_measures": "measures a duration",
        "test_that_runs_alone": "measures a duration",
        "test_short_lease": "has a lease of 9.5 s",
        "test_short_renewal": "has a lease of 9.5 s",
        "test_short_run": "has a lease of 9.5 s",
        "test_group_kill": "kills a process",
        "test_program[ttl0]": "starts a program with a lease of 9.5 s",
        "test_program[ttl1]": "starts a program with a lease of 9.5 s",
    }
    for test, fault in outcomes.items():
        assert done.outcome(test) == "FAILED", done.output
        assert f"A test of the first stage {fault}. Mark it second_stage" in done.said_of(test)
    calm = ["test_that_stays_calm", "test_of_the_second_stage", "test_long_lease", "test_patience"]
    for test in (*calm, "test_usual_patience"):
        assert done.outcome(test) == "PASSED", done.output


LEAVES = """
import os, signal, socket, subprocess, sys, tempfile, threading, time
import pytest
from tests.support import isolation
isolation.ENDS_WITHIN = 0.5
kept = []

def test_thread():
    threading.Thread(target=time.sleep, args=[3], name="stays", daemon=True).start()

def test_thread_that_ends():
    threading.Thread(target=time.sleep, args=[0.1]).start()

def test_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3)"]))

def test_socket():
    kept.append(socket.socket())

def test_file():
    os.close(tempfile.mkstemp(prefix="stays")[0])

def test_file_that_is_removed():
    tempfile.TemporaryFile().close()

def test_variable():
    os.environ["LEFT_BEHIND"] = "1"

def test_variable_that_is_restored(monkeypatch):
    monkeypatch.setenv("LEFT_BEHIND", "1")

def test_folder(tmp_path):
    os.chdir(tmp_path)

def test_handler():
    signal.signal(signal.SIGUSR1, lambda *_: None)

def test_that_comes_after():
    assert "LEFT_BEHIND" not in os.environ
    for one in kept:
        one.terminate() if hasattr(one, "terminate") else one.close()
        one.wait() if hasattr(one, "wait") else None
"""


@pytest.mark.second_stage
def test_test_that_leaves_something_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, LEAVES)
    left = {
        "test_thread": "threads stays",
        "test_process": "processes",
        "test_socket": "sockets",
        "test_file": "files stays",
        "test_variable": "variables LEFT_BEHIND",
        "test_folder": "folder",
        "test_handler": "handlers SIGUSR1",
    }
    for test, what in left.items():
        assert done.outcome(test) == "ERROR", done.output
        assert f"The test left {what}" in done.output
    ended = ("test_thread_that_ends", "test_file_that_is_removed", "test_variable_that_is_restored")
    for test in (*ended, "test_that_comes_after"):
        assert done.outcome(test) == "PASSED", done.output


@pytest.mark.second_stage
def test_run_without_tests_of_its_stage_says_which_option_to_add(tmp_path: Path) -> None:
    late = "import pytest\n@pytest.mark.second_stage\ndef test_late(): pass\n"
    assert "add --stage 2" in run(tmp_path, late).output
    assert "add --stage 2" not in run(tmp_path, late, "--stage", "2").output


KEEPS = """
import os
from tests.support import isolation, servers
isolation.ENDS_WITHIN = 0.5
servers.find = lambda folder, account: folder / "programs"  # as if the account of the server cannot reach the wheel

def test_that_needs_a_server_first():
    servers._template()

def test_variable():
    os.environ["LEFT_BEHIND"] = "1"

def test_that_comes_after():
    assert "LEFT_BEHIND" not in os.environ
    assert os.environ["DBLOCK_POSTGRES"] == str(servers._template().folder / "programs")
"""


@pytest.mark.second_stage
def test_server_that_all_tests_copy_is_kept(tmp_path: Path) -> None:
    done = run(tmp_path, KEEPS)
    assert done.outcome("test_that_needs_a_server_first") == "PASSED", done.output
    assert done.outcome("test_variable") == "ERROR", done.output
    assert done.outcome("test_that_comes_after") == "PASSED", done.output


LATE = """
import time
import pytest
from tests.support import judging, machine
runs = {}

@pytest.fixture
def number(request):
    runs[request.node.name] = runs.get(request.node.name, 0) + 1
    return runs[request.node.name]

def late_in(*runs_that_are_late):
    return pytest.mark.second_stage, runs_that_are_late

@pytest.mark.second_stage
def test_late_once(number):
    judging.LATENESS.append(0.9 if number == 1 else 0.0)
    assert number == 2, "red while the machine was late"

@pytest.mark.second_stage
def test_late_by_its_own_measure_once(number):
    if number == 1:
        machine.not_judged("to renew")

@pytest.mark.second_stage
@pytest.mark.timeout(1)
def test_late_once_with_a_time_limit(number):
    judging.LATENESS.append(0.9 if number == 1 else 0.0)
    time.sleep(0.7)

@pytest.mark.second_stage
@pytest.mark.timeout(1)
def test_late_once_that_hangs_then(number):
    judging.LATENESS.append(0.9 if number == 1 else 0.0)
    assert number == 2
    time.sleep(20)

@pytest.mark.second_stage
def test_late_and_unsafe():
    judging.LATENESS.append(0.9)
    assert not [machine.UNSAFE]

@pytest.mark.second_stage
def test_unsafe_and_not_judged():
    try:
        assert not [machine.UNSAFE]
    except AssertionError:
        machine.not_judged("to renew")

@pytest.mark.second_stage
def test_late_and_unsafe_before_another_failure():
    judging.LATENESS.append(0.9)
    try:
        assert not [machine.UNSAFE]
    finally:
        raise RuntimeError("at the end")

@pytest.fixture
def ends_late():
    yield
    judging.LATENESS.append(0.9)

@pytest.mark.second_stage
def test_red_before_a_late_end(ends_late):
    assert False

@pytest.mark.second_stage
def test_green_before_a_late_end(ends_late):
    pass

@pytest.fixture
def breaks_at_its_end():
    yield
    raise RuntimeError("at the end")

@pytest.mark.second_stage
def test_late_before_a_red_end(breaks_at_its_end):
    judging.LATENESS.append(0.9)

@pytest.mark.second_stage
def test_always_late_and_red():
    judging.LATENESS.append(0.9)
    assert False

@pytest.mark.second_stage
def test_always_late_and_green():
    judging.LATENESS.append(0.9)

@pytest.fixture(scope="module")
def shared():
    return []

@pytest.mark.second_stage
@pytest.mark.parametrize("number", range(2))
def test_late_and_in_the_middle(number, shared):
    judging.LATENESS.append(0.9)
    assert not shared
    shared.append("left behind")

@pytest.mark.second_stage
def test_after_it(shared):
    judging.LATENESS.append(0.0)
    assert not shared
    shared.append("kept")

@pytest.mark.second_stage
def test_on_time(shared):
    judging.LATENESS.append(0.0)
    assert shared == ["kept"]

@pytest.mark.second_stage
def test_red_on_time():
    judging.LATENESS.append(0.0)
    assert False

@pytest.mark.second_stage
@pytest.mark.parametrize("number", range(300))
def test_green_on_time(number):
    judging.LATENESS.append(0.2)
"""

FAKE_MACHINE = (
    CONFTEST
    + """
import pytest

def worst(self, reset=False):
    from tests.support import judging
    return 0.0 if reset or not judging.LATENESS else judging.LATENESS.pop()

@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    from tests.support import judging, machine
    judging.LATENESS = []
    machine.Sleeper.worst = worst
"""
)


@pytest.mark.second_stage
@pytest.mark.parametrize("processes", ["0", "2"])
def test_test_is_not_judged_while_the_machine_is_late(tmp_path: Path, processes: str) -> None:
    done = run(tmp_path, LATE, "--stage", "2", "-n", processes, conftest=FAKE_MACHINE)
    assert done.outcome("test_late_once") == "PASSED", done.output
    for test in ("late_by_its_own_measure_once", "late_once_with_a_time_limit"):
        assert done.outcome(f"test_{test}") == "PASSED", done.output
    for test in ("red_on_time", "late_once_that_hangs_then", "red_before_a_late_end"):
        assert done.outcome(f"test_{test}") == "FAILED", done.output
    for test in ("late_and_unsafe", "unsafe_and_not_judged", "late_and_unsafe_before_another_failure"):
        assert done.outcome(f"test_{test}") == "FAILED", done.output
    assert "6 failed, 305 passed, 6 skipped" in done.output
    assert "6 of 317 tests were not judged" in done.output
    assert " 16 tries were repeated" in done.output
    assert "That is more than" not in done.output
    for test in ("always_late_and_red", "always_late_and_green", "green_before_a_late_end", "late_before_a_red_end"):
        assert f"  test_inner.py::test_{test}" in done.output
    dropped = "Dropped, because the machine was late: test_inner.py::"
    assert f"{dropped}test_late_once: call: AssertionError: red while the machine was late" in done.output
    assert f"{dropped}test_late_before_a_red_end: teardown: RuntimeError: at the end" in done.output
    assert (
        f"{dropped}test_late_by_its_own_measure_once: call: Skipped: not judged: the machine was too late"
        in done.output
    )


@pytest.mark.second_stage
def test_stage_fails_if_too_many_tests_were_not_judged(tmp_path: Path) -> None:
    few = LATE.replace("range(300)", "range(80)").replace("time.sleep(20)", "pass")
    few = few.replace("assert False", "assert True").replace("[machine.UNSAFE]", "[]")
    done = run(tmp_path, few, "--stage", "2", conftest=FAKE_MACHINE)
    assert "9 of 97 tests were not judged" in done.output
    assert "That is more than 2%" in done.output
    assert done.code == pytest.ExitCode.TESTS_FAILED


VENV = """#!/bin/sh
mkdir -p "$3/bin"
echo 'PATH="'"$3"'/bin:$PATH"' >"$3/bin/activate"
for program in pip pytest; do
    printf '#!/bin/sh\\necho "%s $*"\\n[ "%s $*" != "$BREAKS" ]\\n' $program $program >"$3/bin/$program"
    chmod +x "$3/bin/$program"
done
"""
"""Takes the place of python3, and makes an environment whose programs say how they were called."""

STEPS = ["pip install -e .[dev]", "pytest ", "pytest --stage 2"]


@pytest.mark.parametrize("breaks", [*STEPS, "nothing"])
def test_gate_ends_with_the_first_step_that_fails(tmp_path: Path, breaks: str) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in {
        "python3": VENV,
        "apt-get": "#!/bin/sh\nexit 1",
        "service": "#!/bin/sh",
        "node": "#!/bin/sh",
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "BREAKS": breaks, "TMPDIR": str(tmp_path)}
    done = subprocess.run(["bash", tmp_path / ".ci/run"], capture_output=True, text=True, env=environment, timeout=60)
    said = done.stdout.splitlines()
    if breaks == "nothing":
        assert ([line for line in said if line in STEPS], done.returncode) == (STEPS, 0), done.stderr
    else:
        assert (said[-1], done.returncode) == (breaks, 1), done.stderr
    assert sorted(left.name for left in tmp_path.iterdir()) == [".ci", "programs"]


def test_server_that_is_killed_leaves_no_shared_memory_outside_its_folder() -> None:
    with private_server(in_memory=True) as server, psycopg.connect(server.url) as session:
        maps = Path(f"/proc/{session.info.backend_pid}/maps").read_text()
    assert f"{server.data}/pg_dynshmem/" in maps
    assert "/PostgreSQL." not in maps


@pytest.fixture
def own(server: str) -> Any:
    made = Databases(server)
    yield made
    made.close()


def test_each_test_has_a_database_of_its_own(own: Databases) -> None:
    with own.taken(waiters_stay=True) as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT dblock.try_acquire('a', '1 hour')")
    with own.taken(waiters_stay=True) as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        assert connection.execute("SELECT count(*) FROM dblock.distributed_locks").fetchone() == (0,)


def test_database_is_dropped_although_a_session_stands_still_for_long(
    own: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = own._execute
    refused: list[Any] = []

    def refuse_once(*args: Any) -> Any:
        if not refused:
            refused.append(args)
            raise psycopg.errors.ObjectInUse("it is being accessed by other users")
        return execute(*args)

    name = own.create()
    monkeypatch.setattr(own, "_execute", refuse_once)
    own.drop(name)
    assert own._execute("SELECT FROM pg_database WHERE datname = %s", [name]).fetchone() is None


@pytest.mark.parametrize("function", ["catch_up_tokens", "claim_slot"])
def test_database_of_the_first_stage_waits_for_a_session_that_stands_still(own: Databases, function: str) -> None:
    with own.taken(waiters_stay=True) as dsn, psycopg.connect(dsn) as connection:
        assert "'60s'" in str(connection.execute(f"SELECT pg_get_functiondef('dblock.{function}'::regproc)").fetchone())


@pytest.mark.parametrize(("waiters_stay", "alive"), [(True, 300), (False, 3)])
def test_database_of_the_first_stage_keeps_waiters_alive(own: Databases, waiters_stay: bool, alive: int) -> None:
    with own.taken(waiters_stay) as dsn, psycopg.connect(dsn) as connection:
        connection.execute("SET search_path TO dblock")
        connection.execute("SELECT touch_client(gen_random_uuid())")
        query = "SELECT seen_until - clock_timestamp() BETWEEN %s AND %s FROM lock_clients"
        assert connection.execute(query, [f"{alive - 60} s", f"{alive} s"]).fetchone() == (True,)


def test_session_that_a_test_leaves_is_named(own: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.databases.SESSIONS_END_WITHIN", 0.1)
    taken = own.taken(waiters_stay=True)
    with (
        psycopg.connect(taken.__enter__(), application_name="left behind"),
        pytest.raises(AssertionError, match=r"left sessions open.*left behind"),
    ):
        taken.__exit__(None, None, None)
