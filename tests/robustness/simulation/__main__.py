"""Run many seeds, or print the story of one.

python -m tests.robustness.simulation --seeds 100000 --processes 2
python -m tests.robustness.simulation --seed 4711 --trace
python -m tests.robustness.simulation --workload elections --seeds 1000
python -m tests.robustness.simulation --bugs
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.robustness.simulation.many import ALL_BUGS, WORKLOADS, Summary, find_bug, run_many, run_one


def main() -> int:
    """Run what the command line asks for. Return 0 if everything held."""
    parser = argparse.ArgumentParser(prog="python -m tests.robustness.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--trace", action="store_true", help="print its whole story")
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="run so many seeds (default: 1000)")
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="SEED", help="start with this seed")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="use so many processes")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="locks", help="what runs (default: locks)")
    parser.add_argument("--bug", choices=sorted(ALL_BUGS), help="with this bug put in")
    parser.add_argument("--bugs", action="store_true", help="put in each bug in turn, and print how it is found")
    parser.add_argument("--json", action="store_true", help="report as JSON")
    options = parser.parse_args()
    if options.seeds < 1 or options.processes < 1:
        parser.error("there must be one seed and one process at least")
    if options.bugs:
        return _each_bug(options.first, options.seeds, options.json)
    if options.seed is not None:
        return _one(options.seed, options.bug, options.trace, options.json, options.workload)
    try:
        summary = run_many(
            options.first,
            options.seeds,
            options.processes,
            options.bug,
            None if options.json else _progress,
            options.workload,
        )
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    print(json.dumps(summary.report()) if options.json else str(summary))
    return 1 if summary.failures else 0


def _one(seed: int, bug: str | None, trace: bool, as_json: bool, workload: str) -> int:
    outcome = run_one(seed, bug, tracing=True, workload=workload)
    if trace and not as_json:
        print("\n".join(outcome.story))
    if as_json:
        print(json.dumps(vars(outcome) if trace else {**vars(outcome), "story": None}))
    else:
        print(f"seed {seed}: {outcome.what or 'everything held'} ({outcome.steps} steps, story {outcome.digest})")
    return 1 if outcome.check else 0


def _each_bug(first: int, seeds: int, as_json: bool) -> int:
    found = {bug: find_bug(bug, first, seeds) for bug in ALL_BUGS}
    if as_json:
        print(
            json.dumps(
                {
                    bug: one and {"seeds": one[0], "seed": one[1].seed, "check": one[1].check}
                    for bug, one in found.items()
                }
            )
        )
    else:
        for bug, one in found.items():
            told = f"after {one[0]:>5} seeds by: {one[1].what}" if one else f"NOT FOUND in {seeds} seeds"
            print(f"{bug:<28} {told[:150]}")
    return 0 if all(found.values()) else 1


def _progress(summary: Summary) -> None:
    print(f"\r{summary.progress()}  ", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
