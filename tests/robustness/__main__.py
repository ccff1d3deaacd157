"""The robustness suite from the command line.

python -m tests.robustness play mutex freeze --seconds 20 --seed 7    one run
python -m tests.robustness all --out FOLDER                           the whole matrix, and the report
python -m tests.robustness report FOLDER                              the report alone, from what is there

A run that failed is played again under the same seed, and with --keep its whole history can be read. `all` goes on
where it was interrupted: what has a result in the folder is not played again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.robustness import faults, matrix, workloads
from tests.robustness.report import page, results
from tests.robustness.scenarios import Scenario, play
from tests.robustness.stages import ROOT

SKIPPED = 77
"""What a run ends with that cannot be made on this machine."""


def main() -> int:
    """Do what was asked for; 1 if anything failed."""
    asked = _parser().parse_args()
    return int(asked.do(asked))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.robustness", description="Play faults against dblock.")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("play", help="play one scenario, and say what each checker found")
    one.add_argument("workload", choices=workloads.names())
    one.add_argument("fault", nargs="?", default="none", choices=sorted(faults.all_faults()))
    one.add_argument("--seconds", type=float, default=10.0)
    one.add_argument("--strikes", type=int, help="end after so many faults instead")
    one.add_argument("--workers", type=int, default=4)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--option", action="append", default=[], metavar="NAME=NUMBER", help="for the workload")
    one.add_argument("--bug", help="put this bug in")
    one.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the history here")
    one.add_argument("--out", type=Path, metavar="FOLDER", help="put the result and its pictures here")
    one.set_defaults(do=_play)
    every = commands.add_parser("all", help="play the whole matrix, and write the report")
    every.add_argument("--out", type=Path, default=Path("robustness-report"), metavar="FOLDER")
    every.add_argument("--at-once", type=int, default=1, metavar="N")
    every.add_argument("--only", default="", metavar="TEXT", help="only runs whose name contains this")
    every.set_defaults(do=_all)
    again = commands.add_parser("report", help="write the report from the results that are there")
    again.add_argument("out", type=Path, metavar="FOLDER")
    again.set_defaults(do=_report)
    return parser


def _play(asked: argparse.Namespace) -> int:
    options: dict[str, object] = {name: float(value) for name, value in (one.split("=", 1) for one in asked.option)}
    scenario = Scenario(asked.workload, asked.fault, asked.workers, asked.seconds, asked.strikes, options)
    if asked.keep:
        asked.keep.mkdir(parents=True)
    try:
        outcome = play(scenario, asked.seed, bug=asked.bug, folder=asked.keep, progress=_progress)
    except faults.CannotBeDone as error:
        _say(f"{scenario.name}: skipped, {error}")
        return SKIPPED
    result = results.keep(outcome, asked.out) if asked.out else results.result_of(outcome)
    _say(
        f"{result.name}, seed {result.seed}: {result.operations:,} operations, {result.grants:,} grants, "
        f"{result.unknown} unknown, {result.strikes} faults, {result.seconds:.0f} s"
    )
    for finding in outcome.findings:
        _say(f"  {finding.checker}: looked at {finding.looked_at:,}, {len(finding.violations)} violations")
        for what in finding.violations[:5]:
            _say(f"    {what}")
    for trouble in result.trouble:
        _say(f"  trouble: {trouble}")
    return 0 if result.good else 1


def _all(asked: argparse.Namespace) -> int:
    asked.out.mkdir(parents=True, exist_ok=True)
    entries = [(scenario, seed) for scenario, seed in matrix.full() if asked.only in f"{scenario.name} {seed}"]
    began = time.monotonic()
    done = 0

    def play_one(entry: matrix.Entry) -> int:
        nonlocal done
        scenario, seed = entry
        code = 0
        if not results.path_of(asked.out, scenario.workload, scenario.fault, seed).exists():
            code = subprocess.run(
                [*_command(scenario, seed), "--out", asked.out], cwd=ROOT, stdout=subprocess.PIPE
            ).returncode
        done += 1
        so_far = (time.monotonic() - began) / 60
        verdict = {0: "holds", SKIPPED: "skipped, cannot be done here"}.get(code, "FAILED")
        _say(f"{done}/{len(entries)}, {so_far:.0f} min: {scenario.name}, seed {seed}: {verdict}")
        return 0 if code == SKIPPED else code

    with ThreadPoolExecutor(asked.at_once) as threads:
        codes = list(threads.map(play_one, entries))
    return max([_report(asked), *codes])


def _command(scenario: Scenario, seed: int) -> list[str]:
    options = [f"--option={name}={value}" for name, value in scenario.options.items()]
    length = f"--strikes={scenario.strikes}" if scenario.strikes else f"--seconds={scenario.seconds}"
    words = ["play", scenario.workload, scenario.fault, f"--workers={scenario.workers}", f"--seed={seed}", length]
    return [sys.executable, "-m", "tests.robustness", *words, *options]


def _report(asked: argparse.Namespace) -> int:
    found = results.load(asked.out)
    sections = [path.read_text() for path in sorted(asked.out.glob("section-*.md"))]
    _say(f"The report is {page.write(found, asked.out, sections)}")
    return 0 if found and all(one.good for one in found) else 1


def _progress(what: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{what}")
        sys.stderr.flush()


def _say(what: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    print(what, flush=True)


if __name__ == "__main__":
    sys.exit(main())
