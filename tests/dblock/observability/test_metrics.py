"""Metrics: their names and values, how many series they leave, and what Prometheus reads."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import psycopg
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import dblock
import fenced_store
from dblock._core.observation import OUTCOMES, ObservedHold, ObservedWait
from dblock.observability import catalogue
from dblock.observability.database import DatabaseMetrics
from dblock.observability.metrics import MetricsObserver
from dblock.observability.prometheus import DatabaseCollector, PrometheusObserver
from dblock.observability.store import Counter, Family, Groups, Histogram, render
from dblock.server import metrics as server_metrics
from tests.support.eventually import eventually
from tests.support.waits import join_queue

METRICS = (*catalogue.METRICS, *server_metrics.METRICS)

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"

UNITS = ("seconds", "bytes", "ratio", "total", "info")
OTHER_UNITS = re.compile(r"milliseconds|microseconds|minutes|hours|percent|kilobytes|_ms(_|$)")


def values(text: str) -> dict[str, float]:
    """Return the series of a text by their names and labels, as `name{label=value}`."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def lint(text: str) -> list[str]:
    """Return what is wrong with the names, by the rules of `promtool check metrics`."""
    wrong = []
    for family in text_string_to_metric_families(text):
        name, kind = family.name, family.type
        samples = {sample.name for sample in family.samples}
        if not family.documentation:
            wrong.append(f"{name}: no help text")
        if not re.fullmatch(r"[a-z_][a-z0-9_]*", name):
            wrong.append(f"{name}: not in lower case with underscores")
        if OTHER_UNITS.search(name):
            wrong.append(f"{name}: no base unit")
        if kind == "counter" and samples and not all(one.endswith("_total") for one in samples):
            wrong.append(f"{name}: a counter ends in _total")
        if kind != "counter" and name.endswith("_total"):
            wrong.append(f"{name}: only a counter ends in _total")
        if kind != "histogram" and re.search(r"_(bucket|count|sum)$", name):
            wrong.append(f"{name}: only a histogram has such an ending")
        if kind in name.split("_"):
            wrong.append(f"{name}: has its kind in its name")
        for sample in family.samples:
            if kind != "histogram" and "le" in sample.labels:
                wrong.append(f"{name}: only a histogram has the label le")
            for label in sample.labels:
                if not re.fullmatch(r"[a-z_][a-z0-9_]*", label) or label in name.split("_"):
                    wrong.append(f"{name}: label {label}")
    return wrong


def ended_wait(lock: str, outcome: str = "granted", seconds: float = 0.01) -> ObservedWait:
    wait = ObservedWait((lock,), "me", 0.0)
    wait.outcome, wait.seconds = outcome, seconds
    return wait


def ended_hold(lock: str, lost: str | None = None) -> ObservedHold:
    hold = ObservedHold(lock, 1, "me", 0.0)
    hold.seconds, hold.lost = 1.0, lost
    return hold


def series_of(families: Iterable[Family]) -> int:
    return sum(len(family.samples) for family in families)


@pytest.mark.second_stage
def test_values_are_those_of_what_the_clients_did(dsn: str, client: dblock.Client) -> None:
    registry = CollectorRegistry()
    with dblock.Client(dsn, observers=[PrometheusObserver(registry)]) as other:
        for _ in range(3):
            with other.lock("order:1"):
                pass
        with client.lock("busy"):
            assert other.lock("busy").try_acquire() is None
        lost = other.lock("short", ttl=0.1, keep_alive=False).acquire()
        eventually(lambda: not lost.remaining(), "the end of the lease")
        found = values(generate_latest(registry).decode())
    assert found["dblock_acquire_wait_seconds_count{group=order,outcome=granted}"] == 3
    assert found["dblock_acquire_wait_seconds_count{group=busy,outcome=busy}"] == 1
    assert found["dblock_hold_seconds_count{group=order}"] == 3
    assert found["dblock_hold_seconds_sum{group=order}"] > 0
    assert found["dblock_leases_lost_total{group=short,reason=expired}"] == 1
    assert found["dblock_listener_up{}"] in (0, 1)


def test_hand_off_renewals_and_margins_are_counted() -> None:
    observer = MetricsObserver()
    wait = ended_wait("a")
    wait.handoff = 0.004
    observer.wait_ended(wait)
    observer.renewed(0.02, [0.65, 0.05])
    found = values(render(observer.families()))
    assert found["dblock_handoff_seconds_bucket{le=0.005}"] == 1
    assert found["dblock_handoff_seconds_bucket{le=0.0025}"] == 0
    assert found["dblock_renewal_seconds_count{}"] == 1
    assert found["dblock_renewal_margin_ratio_bucket{le=0.1}"] == 1
    assert found["dblock_renewal_margin_ratio_count{}"] == 2


def test_listener_is_up_only_if_all_listeners_are() -> None:
    observer = MetricsObserver()
    assert "dblock_listener_up{}" not in values(render(observer.families()))
    for client, up, shown in (("a", True, 1), ("b", False, 0), ("b", True, 1), ("a", False, 0), ("a", None, 1)):
        observer.listener_changed(client, up)
        assert values(render(observer.families()))["dblock_listener_up{}"] == shown


def test_refusal_of_a_fence_is_counted_once(dsn: str) -> None:
    observer = MetricsObserver()
    with fenced_store.FencedStore(dsn) as store:
        store.put("invoice:1", {"a": 1}, fence=7)
        for refused in (lambda: store.put("invoice:1", {"a": 2}, fence=3), lambda: store.claim("invoice:1", fence=3)):
            with pytest.raises((fenced_store.StaleTokenError, fenced_store.FenceAhead)):
                refused()
    assert values(render(observer.families()))["dblock_fence_refusals_total{group=invoice}"] >= 1


def test_refusal_that_is_translated_twice_is_reported_once(owner: psycopg.Connection) -> None:
    from fenced_store import refusals
    from fenced_store.errors import translated

    seen: list[Exception] = []
    cancel = refusals.observe(seen.append)
    try:
        owner.execute("SELECT fenced_store.raise_fence('r', 5)")
        with pytest.raises(psycopg.Error) as refused:
            owner.execute("SELECT fenced_store.raise_fence('r', 4)")
        for _ in range(2):
            assert isinstance(translated(refused.value), fenced_store.StaleTokenError)
    finally:
        cancel()
    translated(refused.value)
    assert len(seen) == 1


def test_observer_that_is_gone_counts_no_refusals() -> None:
    from fenced_store import refusals

    # Those of other tests may go at any moment.
    before = [*refusals._observers]
    observer = MetricsObserver()
    (added,) = [one for one in refusals._observers if one not in before]
    del observer
    assert added not in refusals._observers


@pytest.mark.parametrize("names", [2_000, pytest.param(1_000_000, marks=pytest.mark.second_stage)])
def test_million_names_leave_fewer_than_two_thousand_series(names: int) -> None:
    """Every name is a group of its own, and every outcome and reason occurs with each of the first ones."""
    observer = MetricsObserver()
    for number in range(1_000):
        for outcome in OUTCOMES:
            observer.wait_ended(ended_wait(f"name-{number}", outcome))
        for reason in (None, *catalogue.REASONS):
            observer.hold_ended(ended_hold(f"name-{number}", reason))
        observer.fence_refused(f"name-{number}")
    observer.renewed(0.1, [0.5])
    observer.listener_changed("a", True)
    wait = ended_wait("last")
    wait.handoff = 0.1
    wait.outcome = "granted"
    observer.wait_ended(wait)
    rest = ended_wait("")
    for number in range(1_000, names):
        rest.locks = (f"name-{number}",)
        observer.wait_ended(rest)
    bound = sum(metric.most_series() for metric in catalogue.METRICS)
    here = sum(metric.most_series() for metric in catalogue.METRICS if metric.source == "process")
    assert series_of(observer.families()) <= here
    assert bound < 2_000
    found = values(render(observer.families()))
    total = sum(value for name, value in found.items() if name.startswith("dblock_acquire_wait_seconds_count"))
    assert total == 1_000 * len(OUTCOMES) + 1 + names - 1_000, "no wait is left out"


def test_groups_keep_the_first_hundred_names() -> None:
    groups = Groups()
    assert [groups.of(f"g{number}:x") for number in range(100)] == [f"g{number}" for number in range(100)]
    assert groups.of("late:x") == "other"
    assert groups.of("g7:y:z") == "g7"
    assert Groups().of("plain") == "plain"
    assert Groups().of(":x") == "other"
    assert Groups().of("ü" * 100) == "ü" * 64


def test_counts_are_exact_under_threads() -> None:
    counter, histogram = Counter(catalogue.LEASES_LOST), Histogram(catalogue.HOLD)

    def count() -> None:
        for _ in range(2_000):
            counter.add("expired", "a")
            histogram.observe(1.0, "a")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.family().samples[0].value == 8_000
    assert histogram.family().samples[-1].value == 8_000


def test_rendered_text_is_what_prometheus_client_writes(dsn: str) -> None:
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)
    observer.wait_ended(ended_wait('odd"\\\n: x'))
    observer.hold_ended(ended_hold("a", "forced"))
    observer.renewed(0.1, [0.4])
    observer.listener_changed("a", True)
    assert values(generate_latest(registry).decode()) == values(render(observer.families()))
    assert lint(generate_latest(registry).decode()) == []


def test_every_metric_passes_the_rules_of_promtool(dsn: str, client: dblock.Client) -> None:
    observer, database = MetricsObserver(), DatabaseMetrics(dsn)
    with client.lock("a:1"):
        observer.wait_ended(ended_wait("a:1"))
        observer.hold_ended(ended_hold("a:1", "expired"))
        observer.fence_refused("a:1")
        text = render([*observer.families(), *database.families()])
    database.close()
    assert lint(text) == []
    names = [family.name for family in text_string_to_metric_families(text)]
    assert sorted(names) == sorted(metric.name.removesuffix("_total") for metric in catalogue.METRICS)
    for metric in catalogue.METRICS:
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert metric.name.removesuffix("_total").endswith(UNITS) or metric.kind == "gauge" or metric.kind == "counter"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("# HELP a_ms x\n# TYPE a_ms gauge\na_ms 1\n", "no base unit"),
        ("# TYPE a gauge\na 1\n", "no help text"),
        ("# HELP a_total x\n# TYPE a_total gauge\na_total 1\n", "only a counter"),
        ("# HELP aB x\n# TYPE aB gauge\naB 1\n", "lower case"),
        ('# HELP a x\n# TYPE a gauge\na{le="1"} 1\n', "label le"),
    ],
)
def test_lint_finds_bad_names(text: str, complaint: str) -> None:
    assert any(complaint in one for one in lint(text))


def test_database_metrics_come_from_one_query(dsn: str, client: dblock.Client, owner: psycopg.Connection) -> None:
    registry = CollectorRegistry()
    with contextlib.closing(DatabaseCollector(dsn, registry=registry)):
        with client.lock("order:1"), client.semaphore("gpu", permits=3):
            join_queue(owner, "order:1")
            found = values(generate_latest(registry).decode())
        assert found["dblock_held{group=order}"] == 1
        assert found["dblock_held{group=gpu}"] == 1
        assert found["dblock_waiting{group=order}"] == 1
        assert found["dblock_oldest_wait_seconds{group=order}"] > 0
        assert found["dblock_once_overdue{group=order}"] == 0
        assert found["dblock_database_up{}"] == 1
        owner.execute("DELETE FROM lock_tickets")
        found = values(generate_latest(registry).decode())
        assert found["dblock_held{group=order}"] == 0, "a group that was seen stays, so that its gauge falls to 0"


def test_database_that_is_away_shows_as_down_and_comes_back(dsn: str, owner: psycopg.Connection) -> None:
    database = DatabaseMetrics(dsn)
    assert values(render(database.families()))["dblock_database_up{}"] == 1
    owner.execute("ALTER FUNCTION lock_metrics RENAME TO hidden")
    assert values(render(database.families())) == {"dblock_database_up{}": 0}
    owner.execute("ALTER FUNCTION hidden RENAME TO lock_metrics")
    owner.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    assert values(render(database.families()))["dblock_database_up{}"] == 1
    database.close()
    nowhere = DatabaseMetrics("postgresql://127.0.0.1:1/none")
    assert values(render(nowhere.families())) == {"dblock_database_up{}": 0}


def test_reference_lists_exactly_the_metrics_of_the_code() -> None:
    rows = re.findall(r"^\| `(dblock_\w+)` \| (\w+) \| (.*?) \| (\w+) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    labels = {metric.name: ", ".join(f"`{label}`" for label in metric.labels) or "none" for metric in METRICS}
    assert rows == [(one.name, one.kind, labels[one.name], one.source, one.help) for one in METRICS]


def test_reference_lists_the_buckets_and_the_bound_of_the_code() -> None:
    page = " ".join(PAGE.read_text().split())
    for metric in METRICS:
        if metric.buckets:
            assert f"`{metric.name}`: {', '.join(f'{bound:g}' for bound in metric.buckets)}" in page
    for outcome in OUTCOMES:
        assert f"`{outcome}`" in page
    for reason in catalogue.REASONS:
        assert f"`{reason}`" in page


@pytest.mark.second_stage
def test_metrics_without_their_library_say_what_to_install() -> None:
    extras = (PAGE.parents[2] / "pyproject.toml").read_text()
    for module, library, package in (
        ("prometheus", "prometheus_client", "prometheus-client"),
        ("opentelemetry", "opentelemetry.trace", "opentelemetry-api"),
    ):
        script = f"import sys; sys.modules[{library!r}] = None; import dblock.observability.{module}"
        told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        (needed,) = set(re.findall(rf'"({package}>=[0-9.]+)"', extras))
        assert f"pip install '{needed}'" in told.stderr


def test_metrics_of_the_process_need_no_library() -> None:
    script = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from dblock.observability.metrics import MetricsObserver\n"
        "from dblock.observability.store import render\n"
        "print(len(render(MetricsObserver().families())) > 0, 'psycopg' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).split() == ["True", "False"]
