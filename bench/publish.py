"""Write the results of a run into the docs: the tables, the pictures, the goals, the machine and the versions.

    python -m bench.publish bench-report             bench/results, docs/images and docs/performance
    python -m bench.publish bench-report --baseline  the same, and store the ratios as the baseline

A page of docs/performance has a line `<!-- bench: NAME -->` wherever a table belongs, and `<!-- end -->` after it.
Everything between these two lines is replaced. NAME is that of a table, or `goals`, `machine` or `versions`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from bench.harness import baseline
from bench.harness.table import Table, markdown, number, ratio

ROOT = Path(__file__).parents[1]
RESULTS, PAGES, IMAGES = ROOT / "bench" / "results", ROOT / "docs" / "performance", ROOT / "docs" / "images"

BLOCK = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

MISSING = "Not measured yet.\n"


def load(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the answers in a folder."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def blocks(answers: list[dict[str, Any]]) -> dict[str, str]:
    """Return the text of each block by its name."""
    found: dict[str, str] = {}
    tables: list[Table] = []
    for answer in answers:
        for data in answer["tables"]:
            table = Table.of(data)
            tables.append(table)
            found[table.name] = _block(table, answer["asks"])
    if tables:
        found |= {"goals": _goals(tables), "machine": _machine(tables), "versions": _versions(tables)}
    return found


def _block(table: Table, asks: str) -> str:
    picture = f"![{asks}](../images/performance-{table.name}.svg)\n\n" if table.picture != "none" else ""
    notes = "".join(f"\n{_wrapped(note)}\n" for note in table.notes)
    ratios = (
        f"\nIn brackets: the ratio to {table.reference} in the same run.\n" if table.reference in table.cells else ""
    )
    return f"\n{picture}{markdown(table)}{ratios}{notes}\n"


def _wrapped(text: str) -> str:
    import textwrap

    return textwrap.fill(text, 100)


def _goals(tables: list[Table]) -> str:
    lines = ["", "| table | goal | limit | measured | |", "|---|---|---|---|---|"]
    for table in tables:
        for goal, measured in table.goals:
            column = table.column(goal.column)
            sign = "≤" if column.lower_is_better else "≥"
            limit = f"{sign} {goal.limit:g}" + (f" × {goal.reference}" if goal.reference else "")
            shown = f"{ratio(measured)} ×" if goal.reference else number(measured, column.digits)
            verdict = "met" if table.met(goal, measured) else "**not met**"
            lines.append(f"| {table.title} | {goal.row}: {column.heading} | {limit} | {shown} | {verdict} |")
    return "\n".join([*lines, "", ""])


def _machine(tables: list[Table]) -> str:
    about = tables[0].about
    days = sorted({table.about["measured"] for table in tables})
    told = [f"{key}: {value}" for key, value in about["machine"].items()]
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


def render(page: str, texts: dict[str, str]) -> str:
    """Return a page with every block replaced."""
    return BLOCK.sub(lambda found: found[1] + texts.get(found[2], MISSING) + found[3], page)


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench.publish", description="Write the results of a run into the docs.")
    parser.add_argument("report", type=Path, nargs="?", help="the folder of a run; without it, of the stored results")
    parser.add_argument("--baseline", action="store_true", help="store the ratios as the baseline")
    options = parser.parse_args()
    if options.report is not None:
        RESULTS.mkdir(exist_ok=True)
        for answer in load(options.report):
            if any(table["about"]["quick"] for table in answer["tables"]):
                parser.error(f"{answer['question']} is of a quick run, whose figures mean nothing.")
            (RESULTS / f"{answer['question']}.json").write_text(json.dumps(answer, indent=1, ensure_ascii=False) + "\n")
            for table in answer["tables"]:
                if (picture := options.report / f"{table['name']}.svg").exists():
                    shutil.copyfile(picture, IMAGES / f"performance-{table['name']}.svg")
    answers = load()
    texts = blocks(answers)
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(render(path.read_text(), texts))
    if options.baseline:
        baseline.save(Table.of(data) for answer in answers for data in answer["tables"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
