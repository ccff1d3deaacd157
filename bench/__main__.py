"""Run questions, print their tables, and write the tables and pictures into a folder.

python -m bench                      all questions; fails if a ratio of dblock is worse than the baseline allows
python -m bench pair hand_off_rate   some of them
python -m bench --quick              every question in its smallest size, to see that it works; the figures mean nothing
python -m bench pair --only dblock "redis-py, fsync"
python -m bench --list
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import questions
from bench.harness import baseline, machine, picture
from bench.harness.arena import Arena
from bench.harness.question import Question, Run
from bench.harness.servers import scratch
from bench.harness.table import Table, plain

REPORT = Path("bench-report")


def all_questions() -> dict[str, Question]:
    """Return all questions by name, in the order in which they are run."""
    found = [
        importlib.import_module(f"{questions.__name__}.{module.name}").QUESTION
        for module in pkgutil.iter_modules(questions.__path__)
    ]
    order = {name: place for place, name in enumerate(questions.ORDER)}
    return {one.name: one for one in sorted(found, key=lambda one: order[one.name])}


def parse(arguments: Sequence[str] | None, names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench", description="Measure dblock beside other ways to lock.")
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help="; ".join(names))
    parser.add_argument("--quick", action="store_true", help="run the smallest size, to see that it works")
    parser.add_argument("--rounds", type=int, help="the number of rounds, instead of that of each question")
    parser.add_argument("--no-repeat", action="store_true", help="do not repeat blocks that were disturbed")
    parser.add_argument("--only", nargs="+", default=(), metavar="CONTENDER", help="leave out all other contenders")
    parser.add_argument("--out", type=Path, default=REPORT, help=f"the folder to write to (default: {REPORT})")
    parser.add_argument("--save-baseline", action="store_true", help="store the ratios instead of checking them")
    parser.add_argument("--list", action="store_true", help="list the questions")
    options = parser.parse_args(arguments)
    if unknown := set(options.questions) - set(names):
        parser.error(f"no question: {', '.join(sorted(unknown))}. There are: {', '.join(names)}")
    return options


def answer(question: Question, options: argparse.Namespace, arena: Arena) -> list[Table]:
    """Run one question, print its tables, and write them and their pictures."""
    began = time.monotonic()
    disk = machine.fsync_time(arena.folder)
    run = Run(arena, options.quick, options.rounds, not options.no_repeat, arena.folder)
    tables = [table for table in question.measure(run) if table.cells]
    versions = arena.all_versions()
    about = {
        "machine": machine.describe() | {"fdatasync": f"{disk * 1e6:.0f} µs"},
        "versions": versions,
        "measured": time.strftime("%Y-%m-%d"),
        "quick": options.quick,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"\n{question.asks}  ({question.name}, {time.monotonic() - began:.0f} s)\n")
    for table in tables:
        table.about |= about
        print(plain(table) + "\n", flush=True)
        if table.picture != "none":
            (options.out / f"{table.name}.svg").write_text(picture.draw(table, question.asks))
    answers = {"question": question.name, "asks": question.asks, "tables": [table.data() for table in tables]}
    (options.out / f"{question.name}.json").write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
    return tables


def main(arguments: Sequence[str] | None = None) -> int:
    known = all_questions()
    options = parse(arguments, list(known))
    if options.list:
        for name, question in known.items():
            print(f"{name:20} {question.asks}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the servers too
    tables: list[Table] = []
    asked = [known[name] for name in options.questions or known]
    # Each question has servers of its own, so that none works beside servers that it does not need. A quick run
    # measures nothing, and shares them.
    for group in [asked] if options.quick else [[one] for one in asked]:
        with scratch() as folder, Arena(folder, options.only) as arena:
            for question in group:
                tables += answer(question, options, arena)
    if options.quick:
        return 0
    if options.save_baseline:
        baseline.save(tables)
        return 0
    stored = baseline.load()
    worse = [line for table in tables for line in baseline.regressions(table, stored)]
    for line in worse:
        print(f"WORSE THAN THE BASELINE: {line}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
