"""Every question of the benchmarks runs, in its smallest size, with the peers that are installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import publish
from bench.__main__ import all_questions

pytestmark = pytest.mark.second_stage

ROOT = Path(__file__).parents[2]


def run(out: Path, *arguments: str) -> str:
    command = ["nice", "-n", "5", sys.executable, "-m", "bench", "--quick", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SOME = ["hand_off_rate", "fences"]
"""Questions that the second stage asks. They use most of what the others use."""


@pytest.mark.parametrize("names", [SOME, pytest.param(None, marks=pytest.mark.nightly)], ids=["some", "all"])
def test_every_question_prints_a_table_and_draws_it(tmp_path: Path, names: list[str] | None) -> None:
    few = ["dblock", "dblock, asyncio", "sketch"]
    # The next test asks "pair".
    questions = {name: one for name, one in all_questions().items() if name in (names or {*all_questions()} - {"pair"})}
    printed = run(tmp_path, *questions, "--only", *few)
    places = {name for page in publish.pages() for _, name, _ in publish.BLOCK.findall(page.read_text())}
    for name, question in questions.items():
        assert question.asks in printed
        tables = json.loads((tmp_path / f"{name}.json").read_text())["tables"]
        for table in tables:
            assert table["rows"], table["name"]
            assert table["name"] in places, f"no page of docs/performance shows {table['name']}"
            assert ElementTree.parse(tmp_path / f"{table['name']}.svg").getroot().tag.endswith("svg")


@pytest.mark.nightly
def test_every_installed_peer_makes_pairs(tmp_path: Path) -> None:
    run(tmp_path, "pair")
    (table,) = json.loads((tmp_path / "pair.json").read_text())["tables"]
    rows = table["rows"]
    assert {"dblock", "dblock, efficiency", "pg_advisory_lock", "sketch", "two SQL statements"} <= set(rows)
    assert all(cells["p50"]["value"] > 0 for cells in rows.values())
