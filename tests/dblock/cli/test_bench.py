"""`dblock bench`: its figures are complete and consistent, it leaves no lock held, and it can be interrupted."""

from __future__ import annotations

import signal
import time
from itertools import pairwise

import psycopg
import pytest
from psycopg import conninfo

from dblock.admin import schema
from dblock.cli.bench.command import buckets
from dblock.cli.bench.measure import FEWEST_SAMPLES, Timing
from tests.support.eventually import eventually
from tests.support.proxy import Proxy
from tests.support.shell import Shell, ended
from tests.support.stages import first
from tests.support.terminal import Terminal

FIGURES = ("round_trip", "commit", "pair", "many", "handoff")


def locks(dsn: str) -> list[tuple[str, bool]]:
    """Return the bench's locks, each with whether it is held."""
    with psycopg.connect(dsn) as connection:
        found = connection.execute(
            "SELECT name, expires_at > clock_timestamp() FROM dblock.distributed_locks WHERE name LIKE 'bench:%'"
        ).fetchall()
    return [(name, held) for name, held in found]


@pytest.mark.second_stage
def test_role_that_may_only_lock_gets_every_figure(shell: Shell, dsn: str, role: str) -> None:
    schema.grant(dsn, role)
    began = time.monotonic()
    done = shell.run(
        "bench",
        "--seconds",
        "1",
        "--clients",
        "3",
        "--json",
        dsn=conninfo.make_conninfo(dsn, user=role, password="app"),
    )
    assert done.code == 0, done.err
    assert time.monotonic() - began < 10
    data = done.json
    for what in FIGURES:
        figures = data[what]
        assert figures["count"] > 5
        assert 0 < figures["median_ms"] <= figures["p90_ms"] <= figures["p99_ms"] <= figures["max_ms"]
        assert figures["per_second"] > 1
    assert data["pair_in_round_trips"] == pytest.approx(
        data["pair"]["median_ms"] / data["round_trip"]["median_ms"], rel=0.01
    )
    assert data["pair_in_round_trips"] > 1, "a pair is two calls"
    assert sum(one["count"] for one in data["pair_histogram"]) == data["pair"]["count"]
    # One client runs one pair at a time, so the rate and the median must agree.
    assert data["pair"]["per_second"] * data["pair"]["median_ms"] < 1000 * 1.5
    left = locks(dsn)
    assert left
    assert not any(held for _, held in left)
    assert {name.rpartition(":")[0] + ":*" for name, _ in left} == {data["locks_left"]}


def test_figures_are_printed_as_a_table_and_a_histogram(shell: Shell, dsn: str, owner: psycopg.Connection) -> None:
    done = shell.run("bench", "--seconds", "1")
    assert done.code == 0, done.err
    assert done.err == ""
    for part in ("MEDIAN", "P99", "acquire and release, 4 at once", "hand-off, 4 in the queue", "takes as long as"):
        assert part in done.out
    assert ("fsync is off" in done.out) is (owner.execute("SHOW fsync").fetchone() == ("off",))
    assert "# " in done.out
    assert done.out.isascii() or "…" in done.out
    assert f"{len(locks(dsn))} free locks" in done.out


@pytest.mark.second_stage
def test_terminal_shows_the_progress(shell: Shell) -> None:
    with Terminal(shell.command("bench", "--seconds", "1"), columns=70, rows=60) as terminal:
        assert terminal.ended() == 0
        screen = terminal.text
        shown = terminal.raw.decode()
    assert "%" in shown
    assert "%" not in screen, "the progress is removed at the end"
    assert "█" in screen


@pytest.mark.parametrize("wrong", [["--seconds", "0"], ["--seconds", "nan"], ["--clients", "0"], ["--clients", "x"]])
def test_invalid_options_are_refused(shell: Shell, wrong: list[str]) -> None:
    done = shell.run_here("bench", *wrong)
    assert (done.code, done.out) == (2, "")
    assert wrong[0] in done.err


@pytest.mark.second_stage
@pytest.mark.parametrize("phase", first(0, ["shared", "alone"]))
def test_interrupted_bench_holds_nothing(shell: Shell, dsn: str, phase: str) -> None:
    process = shell.start("bench", "--seconds", "8" if phase == "alone" else "3")
    eventually(lambda: [name for name, _ in locks(dsn) if name.endswith(phase)], "the lock")
    process.send_signal(signal.SIGINT)
    done = ended(process)
    assert (done.code, done.err) == (130, "dblock: interrupted\n")
    assert not any(held for _, held in locks(dsn))
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT count(*) FROM dblock.lock_tickets").fetchone() == (0,)


@pytest.mark.parametrize("phase", first(0, ["shared", "", "alone"]))
def test_database_that_goes_away_is_exit_code_69(shell: Shell, dsn: str, phase: str) -> None:
    with Proxy(dsn) as proxy:
        process = shell.start("bench", "--seconds", "3", dsn=proxy.dsn)
        eventually(lambda: not phase or [name for name, _ in locks(dsn) if name.endswith(phase)], "the lock")
        proxy.close()
        done = ended(process)
    assert done.code == 69
    assert done.out == ""
    assert done.err.count("\n") == 1


@pytest.mark.second_stage
def test_bench_gives_up_on_a_database_that_stops_replying(shell: Shell, dsn: str) -> None:
    with Proxy(dsn) as proxy:
        proxy.fall_silent_at(b"SELECT 1")
        began = time.monotonic()
        done = shell.run("bench", "--seconds", "0.5", dsn=proxy.dsn)
    assert done.code == 69
    assert done.err.count("\n") == 1
    assert time.monotonic() - began < 20


@pytest.mark.second_stage
def test_slow_server_gets_more_time_instead_of_a_figure_of_three_calls(shell: Shell, dsn: str) -> None:
    with Proxy(dsn) as proxy:
        proxy.delay = 0.02
        done = shell.run("bench", "--seconds", "0.5", "--clients", "2", "--json", dsn=proxy.dsn)
    assert done.code == 0, done.err
    assert {what: done.json[what]["count"] for what in FIGURES if done.json[what]["count"] < FEWEST_SAMPLES} == {}


def test_missing_schema_suggests_the_install(shell: Shell, bare_dsn: str) -> None:
    done = shell.run_here("bench", dsn=bare_dsn)
    assert done.code == 78
    assert "dblock install" in done.err


def test_quantiles_are_measured_samples() -> None:
    timing = Timing([float(one) for one in range(100, 0, -1)], 10.0)
    assert [timing.quantile(part) for part in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert timing.rate == 10
    assert [Timing([3.0, 1.0, 2.0, 4.0]).quantile(part) for part in (0.5, 0.75, 0.9)] == [2, 3, 4]
    assert (Timing().quantile(0.5), Timing().rate) == (0, 0)


@pytest.mark.parametrize(
    "samples", [[], [0.001], [0.001] * 9, [1e-5, 1e-3, 0.1, 10.0], [1e-6, 3600.0], [1.0, 1.01, 1.02], [0.0, 1.0]]
)
def test_every_sample_is_in_one_bucket(samples: list[float]) -> None:
    found = buckets(samples)
    assert sum(count for _, _, count in found) == len(samples)
    for low, high, count in found:
        assert count == sum(low <= one < high for one in samples) or 0.0 in samples
    assert all(one[1] == other[0] for one, other in pairwise(found))
    assert len(found) <= 12
