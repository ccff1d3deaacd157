"""Run questions, print their tables, and write the tables and pictures into a folder.

python -m bench                      all questions; fails if a ratio of dblock is worse than the baseline allows
python -m bench pair hand_off_rate   some of them
python -m bench --resume             all questions that an interrupted run has not answered
python -m bench --quick              every question in its smallest size, to see that it works; the figures mean nothing
python -m bench pair --only dblock "redis-py, fsync"
python -m bench --list

The status is 0 if all went well, 1 if a question or a contender failed or a ratio is worse than the baseline, and 129,
130 or 143 if the run was interrupted. Answers are written one by one, so a failure or an interrupt keeps those before.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import questions
from bench.harness import baseline, machine, report
from bench.harness.arena import CONTENDERS, Arena
from bench.harness.question import Question, Run
from bench.harness.report import Report
from bench.harness.rounds import cause, say
from bench.harness.servers import scratch
from bench.harness.table import Table, aligned, judged, plain

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
    parser.add_argument("--resume", action="store_true", help="keep the answers that are in the folder already")
    parser.add_argument("--save-baseline", action="store_true", help="store the ratios instead of checking them")
    parser.add_argument("--list", action="store_true", help="list the questions")
    options = parser.parse_args(arguments)
    if unknown := set(options.questions) - set(names):
        parser.error(f"no question: {', '.join(sorted(unknown))}. There are: {', '.join(names)}")
    if strange := [one for one in options.only if re.split("[,:]", one)[0] not in CONTENDERS]:
        parser.error(f"no contender: {'; '.join(strange)}. There are: {'; '.join(CONTENDERS)}; and variants of them.")
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds must be 1 or more, not {options.rounds}")
    return options


class Session:
    """One run of some questions: what was answered, what failed, and what is worse than the baseline."""

    def __init__(self, options: argparse.Namespace, known: dict[str, Question]) -> None:
        self._options = options
        self._chosen: dict[str, Any] = {
            "quick": options.quick, "rounds": options.rounds, "only": list(options.only),
            "repeat": not options.no_repeat,
        }  # fmt: skip
        self._code = report.code()
        self._report = Report(options.out)
        self._asked = [known[name] for name in options.questions or known]
        self._answered: dict[str, list[Table]] = {}
        self._failed: dict[str, str] = {}
        self._stored = {} if options.quick or options.save_baseline else baseline.load()

    def run(self) -> int:
        """Ask the questions, and return the status."""
        began, now = time.monotonic(), "the start"
        self._look_at_earlier_answers()
        remaining = [one for one in self._asked if one.name not in self._answered]
        try:
            # Each question has servers of its own, so that none works beside servers that it does not need. A quick run
            # measures nothing, and shares them.
            for group in [remaining] if self._options.quick else [[one] for one in remaining]:
                with scratch() as folder, Arena(folder, self._options.only) as arena:
                    for question in group:
                        now = question.name
                        place = f"{self._asked.index(question) + 1} of {len(self._asked)}"
                        say(f"{time.strftime('%H:%M:%S')} {now}, question {place}")
                        self._ask(question, arena)
        except (KeyboardInterrupt, SystemExit) as end:
            say(f"Interrupted in {now}. All servers are stopped.")
            self._say_what_is_left()
            return int(end.code or 0) if isinstance(end, SystemExit) else 130
        print(
            f"{len(self._answered)} of {len(self._asked)} questions are answered, after"
            f" {(time.monotonic() - began) / 60:.0f} min. The tables and the pictures are in {self._options.out}."
        )
        return self._conclude()

    def _look_at_earlier_answers(self) -> None:
        earlier = self._report.earlier()
        found = [one.name for one in self._asked if one.name in earlier]
        if found and not self._options.resume:
            say(
                f"{self._options.out} has earlier answers to {', '.join(found)}. This run replaces them one by one."
                " To keep them, interrupt it now and add --resume."
            )
        for name in found if self._options.resume else ():
            if reason := report.reason_to_ask_again(earlier[name], self._chosen, self._code):
                say(f"{name} is asked again: {reason}.")
            else:
                self._answered[name] = report.tables(earlier[name])
                say(f"{name} is answered already.")

    def _ask(self, question: Question, arena: Arena) -> None:
        """Answer a question, and once more if it seems to be worse than the baseline."""
        try:
            tables = self._answer(question, arena)
            worse = self._keep(question, tables)
            if worse:
                say(f"{question.name} seems to be worse than the baseline, so it is asked again.")
                self._keep(question, self._answer(question, arena), worse)
        except Exception as error:
            self._failed[question.name] = cause(error)
            say(f"{question.name} failed: {cause(error)}", error)

    def _answer(self, question: Question, arena: Arena) -> list[Table]:
        """Run one question, and print its tables."""
        began = time.monotonic()
        disk = machine.fsync_time(arena.folder)
        run = Run(arena, self._options.quick, self._options.rounds, not self._options.no_repeat, arena.folder)
        tables = [table for table in question.measure(run) if table.cells]
        if not tables:
            raise RuntimeError("nothing was measured")
        failed = run.failed | run.not_started | arena.failed
        print(f"\n{question.asks}  ({question.name}, {time.monotonic() - began:.0f} s)\n")
        for table in tables:
            table.about |= {
                "machine": machine.describe() | {"fdatasync": f"{disk * 1e6:.0f} µs"},
                "versions": arena.all_versions(),
                "measured": time.strftime("%Y-%m-%d"),
                "seconds": round(time.monotonic() - began),
                "options": self._chosen,
                "code": self._code,
                "failed": failed,
            }
            missing = table.failed | run.not_started
            table.notes += [f"{name} is left out or incomplete: {reason}." for name, reason in missing.items()]
            print(plain(table) + "\n", flush=True)
        return tables

    def _keep(self, question: Question, tables: list[Table], doubted: Iterable[str] | None = None) -> set[str]:
        """Write an answer with its pictures. Return what is worse than the baseline, of what was doubted if given."""
        found: set[str] = set()
        for table in tables:
            worse = baseline.regressions(table, self._stored)
            table.about["worse"] = {what: how for what, how in worse.items() if doubted is None or what in doubted}
            found |= set(table.about["worse"])
        self._report.keep(question.name, question.asks, tables)
        self._answered[question.name] = tables
        return found

    def _conclude(self) -> int:
        """Say what failed and what is worse than the baseline, and return the status."""
        tables = [table for answer in self._answered.values() for table in answer]
        if self._failed:
            self._say_what_is_left()
        failed = {(name, reason) for table in tables for name, reason in table.about["failed"].items()}
        for name, reason in sorted(failed):
            say(f"LEFT OUT: {name}: {reason}")
        bad = bool(self._failed or failed)
        if self._options.quick:
            return int(bad)
        goals = [(f"{table.name}: {limit}", *rest) for table in tables for limit, *rest in judged(table)]
        if goals:
            print("\n".join(["", *aligned([("goal", "measured", ""), *goals]), ""]))
            print(f"{sum(goal[-1] == 'met' for goal in goals)} of {len(goals)} goals are met.")
        if self._options.save_baseline:
            baseline.save(tables)
        elif not self._stored:
            print(f"There is no {baseline.PATH.name} to compare with yet. `make bench-publish` stores one.")
        else:
            compared = sum(len(list(baseline.compared(table, self._stored))) for table in tables)
            worse = {what: how for table in tables for what, how in table.about["worse"].items()}
            print(f"{compared} ratios were compared with the baseline. {len(worse)} are worse.")
            for what, how in worse.items():
                say(f"WORSE THAN THE BASELINE: {what}: {how}")
            bad = bad or bool(worse)
        return int(bad)

    def _say_what_is_left(self) -> None:
        for name, reason in self._failed.items():
            say(f"FAILED: {name}: {reason}")
        left = [one.name for one in self._asked if one.name not in self._answered]
        say(f"Answered, and kept in {self._options.out}: {', '.join(self._answered) or 'nothing'}.")
        say(f"Not answered: {', '.join(left)}. To ask only these, run the same command with --resume.")


def main(arguments: Sequence[str] | None = None) -> int:
    known = all_questions()
    options = parse(arguments, list(known))
    if options.list:
        for name, question in known.items():
            print(f"{name:20} {question.asks}")
        return 0
    # A signal stops the servers too.
    before = {
        number: signal.signal(number, lambda number, _: sys.exit(128 + number))
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        return Session(options, known).run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
