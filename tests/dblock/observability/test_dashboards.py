"""The dashboard and the alert rules in ops/: well-formed, and each metric and label that they name exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dblock.observability import catalogue

OPS = Path(__file__).parents[3] / "ops"

SERIES = {
    metric.name + ending: metric
    for metric in catalogue.METRICS
    for ending in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
}


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((OPS / "grafana" / "dblock.json").read_text())
    return board


def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load((OPS / "prometheus" / "dblock.rules.yml").read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    variables = [one["query"]["query"] for one in dashboard()["templating"]["list"] if one["type"] == "query"]
    return [*panels, *variables, *(rule["expr"] for rule in rules())]


def unknown_names(expression: str) -> set[str]:
    """Return the metrics of an expression that do not exist, and the labels that its metrics do not have."""
    names = set(re.findall(r"\bdblock_\w+", expression))
    known = {label for name in names & set(SERIES) for label in (*SERIES[name].labels, "le", "job", "instance")}
    selected = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)
    grouped = [label for found in re.findall(r"\bby \(([^)]*)\)", expression) for label in re.split(r",\s*", found)]
    return (names - set(SERIES)) | ({*selected, *grouped} - known)


def test_alert_on_a_counter_fires_at_the_first_event_of_a_series() -> None:
    """A labelled series begins with its first event, which increase() does not count."""
    counted = [(name, rule["expr"]) for rule in rules() for name in re.findall(r"increase\((\w+)\[", rule["expr"])]
    assert {name for name, _ in counted} == {"dblock_leases_lost_total", "dblock_fence_refusals_total"}
    for name, expression in counted:
        assert f"({name} unless {name} offset 15m) > 0" in expression


def test_every_metric_and_label_of_the_dashboard_and_the_rules_exists() -> None:
    assert len(expressions()) > 20
    for expression in expressions():
        assert re.search(r"\bdblock_", expression), expression
        assert unknown_names(expression) == set(), expression


@pytest.mark.parametrize(
    "expression",
    [
        "dblock_waits",
        "rate(dblock_hold_seconds[5m])",
        "sum by (lock) (dblock_held)",
        'dblock_held{name="a"}',
    ],
)
def test_check_finds_a_metric_or_label_that_does_not_exist(expression: str) -> None:
    assert unknown_names(expression)


def test_every_metric_is_on_the_dashboard() -> None:
    shown = " ".join(target["expr"] for panel in dashboard()["panels"] for target in panel["targets"])
    assert [metric.name for metric in catalogue.METRICS if metric.name not in shown] == []


def test_parentheses_of_every_expression_are_balanced() -> None:
    for expression in expressions():
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), expression


def test_panels_have_titles_numbers_and_places_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_every_alert_says_what_is_wrong_and_what_to_look_at() -> None:
    assert {rule["alert"] for rule in rules()} >= {
        "DblockLockHeldTooLong",
        "DblockWaitersOld",
        "DblockLeasesLost",
        "DblockScheduleOverdue",
        "DblockFenceRefusals",
    }
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "description"}, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
