"""A run of the benchmarks survives what goes wrong: failing questions, dead peers, interrupts, earlier answers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench.harness import arena, baseline, machine, report, servers, usage
from bench.harness.contender import Contender
from bench.harness.question import Question, Run
from bench.harness.servers import Running
from bench.harness.table import Column, Table
from bench.harness.workers import Team, WorkerError
from tests.support.eventually import eventually

COLUMNS = (Column("time", "time µs", checked=0.1),)


class Asked:
    """Questions that count how often they are asked, and answer with a ratio to a peer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.order: list[str] = []
        self.times: dict[str, list[float]] = {}
        """What dblock takes each time a question is asked, if not 10 µs."""
        self.later: list[float] = []
        """The same for another row, whichever question is asked."""
        self.errors: dict[str, BaseException] = {}
        known = {name: Question(name, f"What about {name}?", lambda run, name=name: [self._measure(run, name)])  # type: ignore[misc]
                 for name in names}  # fmt: skip
        monkeypatch.setattr(bench, "all_questions", lambda: known)
        monkeypatch.setattr(report, "code", lambda: "same code")
        monkeypatch.setattr(machine, "fsync_time", lambda folder: 0.001)

    def _measure(self, run: Run, name: str) -> Table:
        self.order.append(name)
        if name in self.errors:
            raise self.errors[name]
        times = self.times.get(name)
        ours = times.pop(0) if times else 10.0
        later = self.later.pop(0) if self.later else 10.0
        blocks = {"dblock": lambda: {"time": ours}, "dblock, later": lambda: {"time": later}}
        blocks["peer"] = lambda: {"time": 10.0}
        return Table(name, "one client", "peer", COLUMNS).fill(run.interleave(blocks, 1))


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A baseline in which dblock takes as long as its peer."""
    path = tmp_path / "baseline.json"
    rows = {"dblock": {"time": 1.0}, "dblock, later": {"time": 1.0}}
    path.write_text(json.dumps({"one": rows, "two": rows}))
    load = baseline.load
    monkeypatch.setattr(baseline, "load", lambda: load(path))
    return path


def run(tmp_path: Path, *arguments: str) -> int:
    return bench.main([*arguments, "--no-repeat", "--out", str(tmp_path / "report")])


def test_question_that_fails_leaves_the_others_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stored: Path
) -> None:
    asked = Asked(monkeypatch, "one", "two", "three")
    asked.errors["two"] = RuntimeError("no disk")
    assert run(tmp_path) == 1
    assert asked.order == ["one", "two", "three"]
    assert sorted(report.Report(tmp_path / "report").earlier()) == ["one", "three"]
    told = capsys.readouterr().err
    assert "FAILED: two: RuntimeError: no disk" in told
    assert "Not answered: two. To ask only these, run the same command with --resume." in told


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_interrupted_run_keeps_its_answers_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stored: Path,
    error: BaseException, status: int,
) -> None:  # fmt: skip
    asked = Asked(monkeypatch, "one", "two", "three")
    asked.errors["two"] = error
    assert run(tmp_path) == status
    assert asked.order == ["one", "two"]
    assert "Interrupted in two. All servers are stopped.\nAnswered, and kept in" in capsys.readouterr().err
    asked.errors.clear()
    asked.order.clear()
    assert run(tmp_path, "--resume") == 0
    assert asked.order == ["two", "three"]
    assert "one is answered already." in capsys.readouterr().err


def test_answers_of_other_runs_are_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stored: Path
) -> None:
    asked = Asked(monkeypatch, "one")
    run(tmp_path, "--rounds", "2")
    for arguments, code, reason in (
        (["--resume"], "same code", "it was asked with other options"),
        (["--resume"], "other code", "dblock has changed since"),
        ([], "other code", "has earlier answers to one. This run replaces them one by one."),
    ):
        asked.order.clear()
        monkeypatch.setattr(report, "code", lambda code=code: code)
        assert run(tmp_path, *arguments) == 0
        assert asked.order == ["one"]
        assert reason in capsys.readouterr().err


def test_question_with_a_failed_contender_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stored: Path
) -> None:
    asked = Asked(monkeypatch, "one")
    monkeypatch.setattr(arena.Arena, "failed", {"etcd": "it did not start"}, raising=False)
    monkeypatch.setattr(arena.Arena, "__init__", lambda self, folder, only: setattr(self, "folder", folder))
    monkeypatch.setattr(arena.Arena, "__exit__", lambda *_: None)
    monkeypatch.setattr(arena.Arena, "all_versions", lambda self: {})
    assert run(tmp_path) == 1
    assert "LEFT OUT: etcd: it did not start" in capsys.readouterr().err
    assert run(tmp_path, "--resume") == 1
    assert asked.order == ["one", "one"]


def test_ratio_is_a_regression_only_if_it_is_worse_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stored: Path
) -> None:
    asked = Asked(monkeypatch, "one", "two")
    asked.times = {"one": [12.0, 10.0], "two": [12.0, 13.0]}
    asked.later = [10.0, 20.0]  # worse only in the second answer to one
    assert run(tmp_path) == 1
    assert asked.order == ["one", "one", "two", "two"]
    printed = capsys.readouterr()
    assert "4 ratios were compared with the baseline. 1 are worse." in printed.out
    assert "WORSE THAN THE BASELINE: two: dblock, time µs: 1.30 × peer, and it was 1.00 ×" in printed.err
    # A resumed run reports it too, and does not ask again.
    asked.order.clear()
    assert run(tmp_path, "--resume") == 1
    assert asked.order == []


def test_server_that_does_not_start_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @contextlib.contextmanager
    def broken() -> Iterator[Running | None]:
        raise servers.DidNotStart("etcd did not start:\nthe port is taken")
        yield None

    with arena.Arena(tmp_path) as made:
        assert made._start("etcd", broken) is None
        assert made._start("etcd", broken) is None
    assert made.failed == {"etcd": "the port is taken"}
    assert capsys.readouterr().err.count("etcd is left out.") == 1


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process in place of a server."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.second_stage
def test_team_notices_clients_and_servers_that_end(sleeper: subprocess.Popen[bytes]) -> None:
    stuck = Contender("stuck", f"{__name__}:Stuck", "", sleeper.pid)
    with (
        pytest.raises(WorkerError, match="ConnectionError: no such peer"),
        Team(Contender("b", f"{__name__}:broken", "")),
    ):
        raise AssertionError
    with pytest.raises(WorkerError, match="a client of stuck has ended"), Team(stuck) as team:
        team.begin("get")
        (pid,) = team.pids
        os.kill(pid, signal.SIGKILL)
        team.collect()
    with pytest.raises(WorkerError, match=rf"the server of stuck \(pid {sleeper.pid}\) has ended"), Team(stuck) as team:
        team.begin("get")
        sleeper.kill()
        team.collect()
    assert not any(process.is_alive() for process in team.processes)


def broken(where: str) -> None:
    raise ConnectionError("no such peer")


class Stuck:
    """A peer that waits for ever."""

    def __init__(self, where: str) -> None:
        pass

    def acquire(self, name: str) -> None:
        time.sleep(600)

    def close(self) -> None:
        pass


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that accounts other than root's can reach, with a short path."""
    with tempfile.TemporaryDirectory(prefix="bench-") as made:
        os.chmod(made, 0o755)
        yield Path(made)


@pytest.mark.second_stage
def test_interrupt_from_the_keyboard_stops_all_servers(tmp_path: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "bench", "takeover", "--only", "dblock", "redis-py", "--out", str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], env=environment, stderr=subprocess.PIPE, text=True,
        stdout=subprocess.DEVNULL, start_new_session=True,
    ) as process:  # fmt: skip
        wanted = {"postgres", "redis-server"} if shutil.which("redis-server") else {"postgres"}

        def started() -> set[int] | None:
            assert process.poll() is None
            return pids if wanted <= _names(pids := usage.tree(process.pid)) else None

        pids = eventually(started, "the start of all servers")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes of the group
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "Interrupted in takeover. All servers are stopped." in told
    assert "Traceback" not in told
    assert not [pid for pid in pids if servers.runs(pid)]
    assert not list(folder.glob("dblock-bench-*"))


def _names(pids: set[int]) -> set[str]:
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.add(Path(f"/proc/{pid}/comm").read_text().strip())
    return found
