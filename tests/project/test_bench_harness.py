"""What the benchmarks measure and report: ratios, goals, regressions, disturbed blocks, processor time, pages."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from bench import publish
from bench.__main__ import all_questions, parse
from bench.harness import baseline, machine, picture, report, rounds, usage
from bench.harness.loads import Ledger
from bench.harness.rounds import Measured, interleave, quantile
from bench.harness.table import Column, Goal, Table, markdown, plain
from bench.peers.etcd_lock import decode, encode

COLUMNS = (Column("time", "time µs", checked=0.1), Column("rate", "pairs/s", lower_is_better=False, checked=0.1))


def measured(**rows: dict[str, list[float]]) -> Measured:
    return Measured({name.replace("_", " "): columns for name, columns in rows.items()}, blocks=1)


def table(dblock: list[float], peer: list[float], rate: float = 10.0, picture: str = "bars") -> Table:
    found = measured(dblock={"time": dblock, "rate": [rate]}, peer={"time": peer, "rate": [10.0]})
    made = Table("pair", "one client", "peer", COLUMNS, picture=picture)
    made.about = {"machine": {"processors": "2"}, "versions": {"peer": "1.0"}, "measured": "2026-01-01", "failed": {}}
    made.about |= {"options": publish.FULL, "code": "0", "worse": {}}
    return made.fill(found, [Goal("dblock", "time", "peer", 0.5), Goal("dblock", "rate", "", 10)])


def test_ratio_is_computed_within_each_round() -> None:
    # The machine became ten times slower after the first round. Medians of each side would have the ratio 200 / 40.
    slower = table([10.0, 200.0, 300.0], [20.0, 400.0, 40.0])
    assert slower.cells["dblock"]["time"].ratio == 0.5


def test_median_counts_what_did_not_happen_as_the_longest() -> None:
    made = table([10.0, math.nan, 30.0], [20.0, 400.0, 50.0])
    cell = made.cells["dblock"]["time"]
    assert (cell.value, cell.ratio) == (30.0, 0.6)
    mostly = table([math.nan, math.nan, 30.0], [20.0, 400.0, 60.0])
    assert math.isnan(mostly.cells["dblock"]["time"].value)
    assert "goal: dblock, time µs ≤ 0.5 × peer: – ×, NOT MET" in plain(mostly)


def test_goal_without_its_peer_is_named() -> None:
    made = table([10.0], [])
    assert len(made.goals) == 1
    assert "The goal “dblock, time µs ≤ 0.5 × peer” was not judged: dblock or peer was not measured." in plain(made)


def test_goal_is_a_ratio_or_a_figure() -> None:
    made = table([10.0], [16.0], rate=9.0)
    assert [(goal.column, made.met(goal, ratio)) for goal, ratio in made.goals] == [("time", False), ("rate", False)]
    assert "goal: dblock, time µs ≤ 0.5 × peer: 0.62 ×, NOT MET" in plain(made)
    good = table([10.0], [20.0], rate=11.0)
    assert all(good.met(goal, ratio) for goal, ratio in good.goals)


def test_baseline_refuses_only_what_is_worse_than_its_tolerance(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    baseline.save([table([10.0], [10.0])], path)
    stored = baseline.load(path)
    assert stored == {"pair": {"dblock": {"time": 1.0, "rate": 1.0}}}
    assert not baseline.regressions(table([10.9], [10.0], rate=9.2), stored)
    assert not baseline.regressions(table([1.0], [10.0], rate=99.0), stored)
    assert baseline.regressions(table([11.2], [10.0], rate=8.9), stored) == {
        "pair: dblock, time µs": "1.12 × peer, and it was 1.00 ×",
        "pair: dblock, pairs/s": "0.89 × peer, and it was 1.00 ×",
    }
    noisy = table([11.2], [10.0], rate=8.9)
    noisy.noisy = ["dblock"]
    assert not baseline.regressions(noisy, stored)


def test_table_survives_its_json() -> None:
    made = table([math.nan], [20.0])
    again = Table.of(made.data())
    assert markdown(again) == markdown(made)
    assert "NaN" not in str(made.data()["rows"])


@pytest.mark.parametrize("kind", ["bars", "in order", "lines"])
def test_picture_is_one_svg_with_every_row(kind: str) -> None:
    made = table([10.0], [20.0], picture=kind)
    made.cells["a <b> & c"] = made.cells["dblock"]
    root = ElementTree.fromstring(picture.draw(made, "What does it cost?"))
    texts = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"dblock", "peer", "a <b> & c"} <= set(texts)


def test_disturbed_block_is_repeated_and_the_calmest_attempt_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbances = iter([0.5, 0.2, 0.3, 0.4, 0.01])

    class Watch:
        def disturbance(self) -> float:
            return next(disturbances)

    monkeypatch.setattr(rounds, "Watch", Watch)
    values: Iterator[float] = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    found = interleave({"dblock": lambda: {"time": next(values)}}, 2)
    assert found.values == {"dblock": {"time": [2.0, 5.0]}}
    assert (found.blocks, found.repeated, found.disturbed) == (2, 3, 1)


def test_block_that_fails_keeps_its_rounds_and_the_other_blocks_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    turns = iter([1.0, 2.0])

    def dies() -> rounds.Sample:
        if (turn := next(turns, None)) is None:
            raise RuntimeError("a worker failed:\nTraceback …\nConnectionLoss: the peer has died")
        return {"time": turn}

    found = interleave({"peer": dies, "dblock": lambda: {"time": 5.0}}, 4, repeat=False)
    assert found.values == {"peer": {"time": [1.0, 2.0]}, "dblock": {"time": [5.0] * 4}}
    assert found.failed == {"peer": "it failed in round 3 of 4: ConnectionLoss: the peer has died"}
    assert "peer is left out from here on: it failed in round 3 of 4" in capsys.readouterr().err


def test_block_may_measure_several_rows() -> None:
    found = interleave({"dblock": lambda: {"dblock|p50": 1.0, "dblock, later|p50": 2.0}}, 2, repeat=False).apart()
    assert found.values == {"dblock": {"p50": [1.0, 1.0]}, "dblock, later": {"p50": [2.0, 2.0]}}
    assert (found.blocks, list(found.part(["dblock", "missing"]).values)) == (2, ["dblock"])


def test_each_round_begins_with_another_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_totals", lambda: (0.0, 0.0))
    monkeypatch.setattr(usage, "cpu", lambda *_: 0.0)
    order: list[str] = []

    def block(name: str) -> rounds.Block:
        def run() -> rounds.Sample:
            order.append(name)
            return {"place": float(len(order))}

        return run

    interleave({name: block(name) for name in "abc"}, 3)
    assert "".join(order) == "abcbcacab"


def test_processor_time_of_a_tree_includes_children_that_have_ended() -> None:
    before = usage.cpu(os.getpid())
    script = "import time\nwhile time.process_time() < 0.1: pass"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert usage.cpu(os.getpid()) - before >= 0.09


def test_disturbance_is_what_others_and_the_host_took(monkeypatch: pytest.MonkeyPatch) -> None:
    totals, ours, clock = iter([(100.0, 5.0), (103.0, 5.5)]), iter([50.0, 52.0]), iter([0.0, 5.0])
    monkeypatch.setattr(machine, "_totals", lambda: next(totals))
    monkeypatch.setattr(usage, "cpu", lambda *_: next(ours))
    # Not in the module itself, which threads of other tests use too.
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    # Of ten processor seconds all programs took three, two of them were ours, and the host took half a second.
    assert machine.Watch().disturbance() == pytest.approx(0.15)


def test_ledger_is_seen_by_every_client(tmp_path: Path) -> None:
    path = Ledger.create(tmp_path / "ledger")
    one, other = Ledger(path), Ledger(path)
    assert one.grant(3) == (-1, 0.0)
    assert other.granted() == 3
    one.release(3, 1.5)
    assert other.grant(4) == (3, 1.5)
    assert one.granted() == 4


def test_messages_of_etcd_survive_their_encoding() -> None:
    fields: dict[int, int | bytes] = {1: b"name" * 100, 2: 7_587_861_234_567_890_123, 3: 0}
    assert decode(encode(fields)) == fields


def test_quantile_of_few_values_is_one_of_them() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0], 0.99) == 1.0
    assert math.isnan(quantile([], 0.5))


def test_pages_show_the_stored_results() -> None:
    texts = publish.blocks(report.load(publish.RESULTS))
    for page in publish.pages():
        assert page.read_text() == publish.render(page.read_text(), texts), f"{page.name}: python -m bench.publish"


def test_pages_have_a_block_for_every_table_that_was_measured() -> None:
    text = "".join(page.read_text() for page in publish.pages())
    blocks = {found[2] for found in publish.BLOCK.finditer(text)}
    assert {table["name"] for answer in report.load(publish.RESULTS) for table in answer["tables"]} <= blocks
    assert {"goals", "machine", "versions", "costs"} <= blocks


def test_published_page_has_the_table_between_its_marks() -> None:
    answer = {"question": "pair", "asks": "What?", "tables": [table([10.0], [20.0]).data()]}
    texts = publish.blocks([answer])
    page = "# Title\n\n<!-- bench: pair -->\nold\n<!-- end -->\n\nafter\n<!-- bench: goals -->\n<!-- end -->\n"
    shown = publish.render(page, texts)
    assert "old" not in shown
    assert "| **dblock** | 10 (0.50\u00a0×) | 10 (1.00\u00a0×) |" in shown
    assert "| pair: one client | dblock, time µs ≤ 0.5 × peer | 0.50 × | met |" in shown
    assert publish.render(shown, texts) == shown


def test_summary_of_the_readme_has_a_column_for_each_contender() -> None:
    costs = Table("pair", "one client", "redis-py, fsync", [Column("p50", "p50 µs")])
    costs.fill(measured(dblock={"p50": [10.0]}, kazoo={"p50": [1234.0]}))
    killed = Table("takeover", "killed", "redis-py", [Column("kill", "s", digits=1)])
    killed.fill(Measured({"redis-py": {"kill": [4.0]}, "dblock": {"kill": [0.2]}}))
    costs.about = killed.about = table([1.0], [1.0]).about | {"machine": {"processors": "2", "processor": "Pentium"}}
    answers = [{"question": one.name, "asks": "What?", "tables": [one.data()]} for one in (costs, killed)]
    text = publish.blocks(answers)["costs"]
    assert "| acquire and release, p50 µs | 10 | – | – | 1,234 | – | – |" in text
    assert "| after kill −9 of the holder, s until the next grant | 0.2 | 4.0 | – | – | – | – |" in text
    assert "(2 processors, Pentium)" in text
    assert publish.blocks([])["costs"] == ""


def test_only_a_full_run_without_failures_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def publish_run(**about: object) -> None:
        made = table([10.0], [20.0])
        made.about |= about
        report.Report(tmp_path / "run").keep("pair", "What?", [made])
        publish.main()

    page, results, images = tmp_path / "page.md", tmp_path / "results", tmp_path / "images"
    page.write_text("<!-- bench: pair -->\n<!-- end -->\n")
    images.mkdir()
    (images / "performance-gone.svg").touch()
    monkeypatch.setattr(publish, "pages", lambda: [page])
    monkeypatch.setattr(publish, "RESULTS", results)
    monkeypatch.setattr(publish, "IMAGES", images)
    monkeypatch.setattr(sys, "argv", ["publish", str(tmp_path / "run")])
    for about, message in (
        ({"options": publish.FULL | {"rounds": 1}}, "asked with --quick, --rounds, --only or --no-repeat: pair"),
        ({"failed": {"kazoo": "its server has ended"}}, "kazoo in pair: its server has ended"),
    ):
        with pytest.raises(SystemExit):
            publish_run(**about)
        assert message in capsys.readouterr().err
        assert not results.exists()
    publish_run()
    assert "| **dblock** | 10 (0.50\u00a0×) |" in page.read_text()
    assert [path.name for path in images.iterdir()] == ["performance-pair.svg"]


def test_unknown_question_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["no_such"], list(all_questions()))
    assert "no_such" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["par"], "no question: par. There are: pair"),
        (["--only", "dblock, asyncio", "dblok"], "no contender: dblok. There are: dblock; redis-py;"),
        (["--rounds", "0"], "--rounds must be 1 or more, not 0"),
    ],
)
def test_mistyped_argument_is_refused_before_anything_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments, list(all_questions()))
    assert message in capsys.readouterr().err
