"""On a cluster that Patroni manages, token order holds across every failover, and clients recover by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.robustness.faults.cluster import AsynchronousCluster
from tests.robustness.scenarios import Outcome, Scenario, play
from tests.support import patroni

pytestmark = [
    pytest.mark.skipif(patroni.missing() is not None, reason=str(patroni.missing())),
]


def judge(outcome: Outcome) -> None:
    assert not outcome.violations
    assert not outcome.trouble
    assert "token order" in {finding.checker for finding in outcome.findings}
    assert outcome.strikes


@pytest.mark.second_stage
def test_sibling_promotions_keep_token_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsynchronousCluster, "kinds", ("siblings",))
    judge(play(Scenario("mutex", "cluster-async", workers=2, strikes=1), seed=1, folder=tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["cluster-sync", "cluster-freeze", "cluster-async"])
def test_traffic_continues_after_each_failure_of_the_leader(fault: str, tmp_path: Path) -> None:
    judge(play(Scenario("mutex", fault, strikes=4), seed=2, folder=tmp_path))
