"""Run the robustness suite from the command line.

python -m tests.robustness play mutex freeze --seconds 20 --seed 7    one run
python -m tests.robustness all --out FOLDER                           the whole matrix, and the report
python -m tests.robustness report FOLDER                              the report alone, from the results in FOLDER

If a run fails, its histories and the output of its processes and of the server are kept beside its result. The same
seed gives the same instructions, but the timing of real processes differs from run to run. If you interrupt `all`,
start it again with the same folder: it skips the runs that have a result there.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.robustness import faults, matrix, mutations
from tests.robustness.report import page, results
from tests.robustness.scenarios import Scenario, play
from tests.robustness.traffic import workloads
from tests.robustness.traffic.environment import ROOT

SKIPPED = 77
"""The exit code of a run that this machine cannot perform."""

LONGEST = 3600.0
"""Seconds after which a hanging run of the matrix is terminated."""


def main() -> int:
    """Run the command; return 1 if anything failed."""
    args = _parser().parse_args()
    # When terminated, leave nothing behind: no servers, no mounts, no stopped processes.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        return int(args.do(args))
    except KeyboardInterrupt:
        print("\nInterrupted; nothing is left behind.", file=sys.stderr)
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.robustness", description="Test dblock under faults.")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("play", help="play one scenario, and print the findings of each checker")
    one.add_argument("workload", choices=workloads.names(), metavar="WORKLOAD", help=", ".join(workloads.names()))
    known = sorted(faults.all_faults())
    one.add_argument("fault", nargs="?", default="none", choices=known, metavar="FAULT", help=", ".join(known))
    one.add_argument("--seconds", type=_positive, default=10.0, help="seconds of traffic (default: 10)")
    one.add_argument("--strikes", type=_count, help="end after this number of faults instead")
    one.add_argument("--workers", type=_count, default=4, help="number of traffic processes (default: 4)")
    one.add_argument("--seed", type=int, default=0, help="decides what each process does, but not their timing")
    one.add_argument(
        "--option", action="append", type=_option, default=[], metavar="NAME=NUMBER", help="option of the workload"
    )
    one.add_argument("--bug", choices=list(mutations.all_bugs()), metavar="BUG", help="insert this bug")
    one.add_argument("--keep", type=_new_folder, metavar="FOLDER", help="new folder for the history")
    one.add_argument("--out", type=Path, metavar="FOLDER", help="folder for the result and its pictures")
    one.set_defaults(do=_play)
    every = commands.add_parser("all", help="play the whole matrix, and write the report")
    every.add_argument("--out", type=Path, default=Path("robustness-report"), metavar="FOLDER", help="for the report")
    every.add_argument("--at-once", type=int, default=1, metavar="N", help="runs in parallel (default: 1)")
    every.add_argument(
        "--only", action="append", metavar="TEXT", help="play only the runs whose name contains TEXT (may be repeated)"
    )
    every.set_defaults(do=_all)
    again = commands.add_parser("report", help="write the report from the results in FOLDER")
    again.add_argument("out", type=_folder, metavar="FOLDER")
    again.set_defaults(do=_report)
    return parser


def _positive(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return float(text)


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


def _option(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} does not have the form NAME=NUMBER") from None


def _new_folder(text: str) -> Path:
    if Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text} already exists: name a new folder")
    return Path(text).absolute()


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder: name the --out folder of a run")
    return Path(text)


def _play(args: argparse.Namespace) -> int:
    scenario = Scenario(args.workload, args.fault, args.workers, args.seconds, args.strikes, dict(args.option))
    with tempfile.TemporaryDirectory() as own:
        folder = args.keep or Path(own) / "run"
        folder.mkdir(parents=True)
        kept = results.folder_of(args.out, args.workload, args.fault, args.seed) if args.out else None
        try:
            outcome = play(scenario, args.seed, bug=args.bug, folder=folder, progress=_progress)
            result = results.keep(outcome, args.out) if args.out else results.result_of(outcome)
        except faults.FaultUnavailable as error:
            _print(f"{scenario.name}: skipped: {error}")
            return SKIPPED
        except BaseException:
            _keep_all(folder, kept)
            raise
        if not result.good:
            _keep_all(folder, kept)
    _print(
        f"{result.name}, seed {result.seed}: {result.operations:,} operations, {result.grants:,} grants, "
        f"{result.unknown} of unknown outcome, {result.strikes} faults, {result.seconds:.0f} s"
    )
    for finding in outcome.findings:
        _print(f"  {finding.checker}: checked {finding.checked:,}, {len(finding.violations)} violations")
        for what in finding.violations[:5]:
            _print(f"    {what}")
    for name, why in result.exempt_checkers.items():
        _print(f"  {name}: exempt: {why}")
    for trouble in result.trouble:
        _print(f"  trouble: {trouble}")
    return 0 if result.good else 1


def _keep_all(folder: Path, where: Path | None) -> None:
    """Keep everything that a run has written, if the caller named a folder for it."""
    if where is not None:
        shutil.copytree(folder, where, dirs_exist_ok=True)


def _all(args: argparse.Namespace) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    entries = [
        (scenario, seed)
        for scenario, seed in matrix.full()
        if any(text in f"{scenario.name} {seed}" for text in args.only or [""])
    ]
    if not entries:
        _print(f"The name of no run contains {' or '.join(args.only)!r}. An example of a name: 'mutex / freeze 7'.")
        return 2
    began = time.monotonic()
    done = 0

    def play_one(entry: matrix.Entry) -> int:
        nonlocal done
        scenario, seed = entry
        path = results.path_of(args.out, scenario.workload, scenario.fault, seed)
        code = (0 if results.read(path).good else 1) if path.exists() else _run(_command(scenario, seed), args.out)
        done += 1
        so_far = (time.monotonic() - began) / 60
        verdict = {0: "holds", SKIPPED: "skipped: not possible on this machine"}.get(code, "FAILED")
        _print(f"{done}/{len(entries)}, {so_far:.0f} min: {scenario.name}, seed {seed}: {verdict}")
        return int(code not in (0, SKIPPED))

    with ThreadPoolExecutor(args.at_once) as threads:
        codes = list(threads.map(play_one, entries))
    return max([_report(args), *codes])


def _run(command: list[str], out: Path) -> int:
    """Perform one run in a subprocess and return its exit code. If the run hangs, terminate it and return 1."""
    with subprocess.Popen([*command, "--out", str(out.absolute())], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            return process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            return 1


def _command(scenario: Scenario, seed: int) -> list[str]:
    options = [f"--option={name}={value}" for name, value in scenario.options.items()]
    length = f"--strikes={scenario.strikes}" if scenario.strikes else f"--seconds={scenario.seconds}"
    words = ["play", scenario.workload, scenario.fault, f"--workers={scenario.workers}", f"--seed={seed}", length]
    return [sys.executable, "-m", "tests.robustness", *words, *options]


def _report(args: argparse.Namespace) -> int:
    found = results.load(args.out)
    sections = [path.read_text() for path in sorted(args.out.glob("section-*.md"))]
    _print(f"The report: {page.write(found, args.out, sections, _not_played(args.out))}")
    return 0 if found and all(one.good for one in found) else 1


def _not_played(out: Path) -> list[str]:
    """Return the runs of the matrix without a result, each with the reason if this machine cannot perform it."""
    missing = {name: fault.missing() for name, fault in faults.all_faults().items()}
    return [
        f"{scenario.name}, seed {seed}: {missing[scenario.fault] or 'has no result'}"
        for scenario, seed in matrix.full()
        if not results.path_of(out, scenario.workload, scenario.fault, seed).exists()
    ]


def _progress(what: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{what}")
        sys.stderr.flush()


def _print(what: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    print(what, flush=True)


if __name__ == "__main__":
    sys.exit(main())
