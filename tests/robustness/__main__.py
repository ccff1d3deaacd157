"""Play scenarios: python -m tests.robustness mutex freeze --seconds 20 --seed 7 --keep FOLDER."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.robustness.scenarios import Scenario, play


def main() -> int:
    """Play one scenario and say what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.robustness")
    parser.add_argument("workload")
    parser.add_argument("fault", nargs="?", default="none")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--strikes", type=int)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bug")
    parser.add_argument("--keep", type=Path)
    asked = parser.parse_args()
    scenario = Scenario(asked.workload, asked.fault, asked.workers, asked.seconds, asked.strikes)
    if asked.keep:
        asked.keep.mkdir(parents=True)
    outcome = play(scenario, asked.seed, bug=asked.bug, folder=asked.keep)
    print(f"{scenario.name}: {len(outcome.history)} operations, {outcome.strikes} strikes, {outcome.seconds:.1f} s")
    for finding in outcome.findings:
        print(f"  {finding.checker}: looked at {finding.looked_at}, {len(finding.violations)} violations")
        for what in finding.violations[:5]:
            print(f"    {what}")
    for trouble in outcome.trouble[:10]:
        print(f"  trouble: {trouble}")
    return 1 if outcome.violations or outcome.trouble else 0


if __name__ == "__main__":
    sys.exit(main())
