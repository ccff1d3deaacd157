"""Write the results of a run into the docs: the tables, the pictures, the goals, the machine and the versions.

    python -m bench.publish bench-report             bench/results, docs/images, docs/performance and README.md
    python -m bench.publish bench-report --baseline  the same, and store the ratios as the baseline

A page has a line `<!-- bench: NAME -->` wherever a table belongs, and `<!-- end -->` after it. Everything between these
two lines is replaced. NAME is that of a table, or `goals`, `machine`, `versions` or `costs`, the summary of the README.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness import baseline, report
from bench.harness.report import Answer, load
from bench.harness.table import Table, judged, markdown, number
from bench.questions import ORDER

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "bench" / "results", ROOT / "docs" / "images"
PREFIX = "performance-"

BLOCK = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

MISSING = "Not measured yet.\n"

FULL: dict[str, Any] = {"quick": False, "rounds": None, "only": [], "repeat": True}
"""The options of a run whose results belong into the docs."""

COSTS = (
    ("acquire and release, p50 µs", "pair", "p50"),
    ("processor time of the server for it, µs", "pair", "server"),
    ("pairs/s, 8 processes", "throughput_process", "8"),
    ("hand-offs/s, 8 processes", "hand_off_rate", "rate"),
    ("one hand-off at rest, p50 ms", "hand_off_at_rest", "p50"),
    ("after kill −9 of the holder, s until the next grant", "takeover", "kill"),
    ("connections of a process with 100 waiters", "connections", "100 waiting connections"),
)
"""The rows of the summary: a heading, and the table and the column it is taken from."""

CONTENDERS = ("dblock", "redis-py, fsync", "python-redis-lock, fsync", "kazoo", "etcd v3lock", "pg_advisory_lock")
"""The columns of the summary. A table without fsync has the plain name."""


def pages() -> list[Path]:
    """Return the pages that have blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs" / "performance").glob("*.md"))]


def blocks(answers: list[Answer]) -> dict[str, str]:
    """Return the text of each block by its name."""
    found: dict[str, str] = {"costs": ""}  # the README is complete without figures
    tables: list[Table] = []
    goals: list[str] = []
    for answer in sorted(answers, key=lambda answer: ORDER.index(answer["question"])):
        for table in report.tables(answer):
            tables.append(table)
            found[table.name] = _block(table, answer["asks"])
            goals += _goals(answer["question"].replace("_", " "), table)
    if tables:
        head = ["", "| question | goal | measured | |", "|---|---|---|---|"]
        found |= {
            "goals": "\n".join([*head, *goals, "", ""]),
            "machine": _machine(tables),
            "versions": _versions(tables),
        }
        found["costs"] = _costs({table.name: table for table in tables})
    return found


def _block(table: Table, asks: str) -> str:
    picture = f"![{asks}](../images/{PREFIX}{table.name}.svg)\n\n" if table.picture != "none" else ""
    notes = "".join(f"\n{textwrap.fill(note, 100)}\n" for note in table.notes)
    ratios = (
        f"\nIn brackets: the ratio to {table.reference} in the same run.\n" if table.reference in table.cells else ""
    )
    shown = markdown(table).replace(" ×)", "\u00a0×)")  # so that a narrow column does not part them
    return f"\n{picture}{shown}{ratios}{notes}\n"


def _goals(question: str, table: Table) -> Iterator[str]:
    for limit, measured, verdict in judged(table):
        shown = verdict if verdict == "met" else "**not met**"
        yield f"| {question}: {table.title} | {limit} | {measured} | {shown} |"


def _machine(tables: list[Table]) -> str:
    days = sorted({table.about["measured"] for table in tables})
    told = [f"{key}: {value}" for key, value in tables[0].about["machine"].items()]
    blocks_, disturbed = (sum(table.about.get(key, 0) for table in tables) for key in ("blocks", "disturbed"))
    lines = ["", f"- measured: {' to '.join(dict.fromkeys((days[0], days[-1])))}", *(f"- {one}" for one in told)]
    lines.append(f"- blocks: {blocks_:,}, of which {disturbed:,} were disturbed in every attempt")
    return "\n".join([*lines, "", ""])


def _versions(tables: list[Table]) -> str:
    versions: dict[str, str] = {}
    for table in tables:
        versions |= table.about["versions"]
    lines = [
        "",
        "| | version |",
        "|---|---|",
        *(f"| {name} | {versions[name]} |" for name in sorted(versions, key=str.lower)),
    ]
    return "\n".join([*lines, "", ""])


def _costs(tables: dict[str, Table]) -> str:
    """Return the summary: what was measured of a few tables, with a column for each contender."""
    rows = [(heading, tables[name], key) for heading, name, key in COSTS if key in _keys(tables.get(name))]
    if not rows:
        return ""
    lines = ["", f"| | {' | '.join(f'**{one}**' if one == 'dblock' else one for one in CONTENDERS)} |"]
    lines.append("|---" * (len(CONTENDERS) + 1) + "|")
    for heading, table, key in rows:
        cells = [table.cells.get(one) or table.cells.get(one.removesuffix(", fsync"), {}) for one in CONTENDERS]
        shown = [number(cell[key].value if key in cell else math.nan, table.column(key).digits) for cell in cells]
        lines.append(f"| {heading} | {' | '.join(shown)} |")
    first = rows[0][1].about["machine"]
    where = f"{first['processors']} processors, {first.get('processor') or first['architecture']}"
    told = f"Medians, all over TCP on loopback of one machine ({where})."
    return "\n".join([*lines, "", textwrap.fill(told, 100), "", ""])


def _keys(table: Table | None) -> set[str]:
    return {column.key for column in table.columns} if table is not None else set()


def render(page: str, texts: dict[str, str]) -> str:
    """Return a page with every block replaced."""
    return BLOCK.sub(lambda found: found[1] + texts.get(found[2], MISSING) + found[3], page)


def objections(answers: list[Answer]) -> Iterator[str]:
    """Yield why answers of a run do not belong into the docs."""
    if not answers:
        yield "there are no answers"
    if partial := [answer["question"] for answer in answers if report.about(answer).get("options") != FULL]:
        yield f"asked with --quick, --rounds, --only or --no-repeat: {', '.join(partial)}"
    for answer in answers:
        for name, reason in report.about(answer).get("failed", {}).items():
            yield f"{name} in {answer['question']}: {reason}"
    if len({report.about(answer).get("code") for answer in answers}) > 1:
        yield "the answers are about different states of dblock's code"


def store(folder: Path, answers: list[Answer]) -> None:
    """Copy the answers and the pictures of a run to those that the docs show."""
    RESULTS.mkdir(exist_ok=True)
    for answer in answers:
        path = RESULTS / f"{answer['question']}.json"
        path.write_text(json.dumps(answer, indent=1, ensure_ascii=False) + "\n")
        for table in answer["tables"]:
            if (picture := folder / f"{table['name']}.svg").exists():
                shutil.copyfile(picture, IMAGES / f"{PREFIX}{table['name']}.svg")
    shown = {f"{PREFIX}{table['name']}.svg" for answer in load(RESULTS) for table in answer["tables"]}
    for picture in IMAGES.glob(f"{PREFIX}*.svg"):
        if picture.name not in shown:
            picture.unlink()


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench.publish", description="Write the results of a run into the docs.")
    parser.add_argument("report", type=Path, nargs="?", help="the folder of a run; without it, of the stored results")
    parser.add_argument("--baseline", action="store_true", help="store the ratios as the baseline")
    parser.add_argument("--anyway", action="store_true", help="write also what does not belong into the docs")
    options = parser.parse_args()
    if options.report is not None:
        answers = load(options.report)
        found = list(objections(answers))
        for objection in found:
            print(f"{options.report}: {objection}.", file=sys.stderr)
        if found and not options.anyway:
            parser.error("nothing was written. Ask again, or use --anyway.")
        store(options.report, answers)
    answers = load(RESULTS)
    texts = blocks(answers)
    for path in pages():
        path.write_text(render(path.read_text(), texts))
    if options.baseline:
        baseline.save(table for answer in answers for table in report.tables(answer))
    if missing := sorted({name for path in pages() for _, name, _ in BLOCK.findall(path.read_text())} - set(texts)):
        print(f"Not measured yet: {', '.join(missing)}.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
