"""Search the model: the protocol must hold in every setting, and every seeded bug must break it.

python spec/check.py            what takes a minute or two, with two clients
python spec/check.py --all      also with three clients: some ten minutes, and 9 GB of memory
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

MODEL = Path(__file__).parent / "dblock.pml"

SETTINGS = {
    "asking, holding, writing, letting go; answers lost": [],
    "clients die, in line and holding the lock": ["LOOKS", "CRASHES"],
    "an operator breaks the lock": ["FORCE"],
    "all of that": ["LOOKS", "CRASHES", "FORCE"],
    "a standby is promoted, and has forgotten grants": ["PROMOTES", "LOOKS"],
    "each wants the lock twice": ["ROUNDS=2"],
}

BUGS = {
    "TOKEN_EARLY": [],
    "RENEW_REVIVES": [],
    "KEEPALIVE_OUTLIVES_RELEASE": [],
    "TRUST_FROM_REPLY": [],
    "WHOLE_TTL_AGAIN": [],
    "LOST_WAKEUP": [],
    "NO_RESERVE": [],
    "REAPER_TAKES_LIVING": [],
    "NO_FENCE": [],
    "NO_CLAIM": [],
    "FORCE_FREES": ["FORCE"],
    "NO_JUMP": ["PROMOTES", "LOOKS"],
    "RELEASE_BY_NAME": ["N=3"],
}
"""Each seeded bug, and the setting that it takes to show."""


class Found(NamedTuple):
    """What a search has come to."""

    states: int
    error: str | None
    """What was violated; None if nothing was."""


def search(flags: list[str]) -> Found:
    """Visit every state of the model with these settings, or as many as it takes to find an error."""
    with tempfile.TemporaryDirectory() as folder:

        def run(*command: str) -> str:
            return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout

        run("spin", "-a", *(f"-D{flag}" for flag in flags), str(MODEL))
        run("gcc", "-w", "-O2", "-DSAFETY", "-DVECTORSZ=2048", "-DCOLLAPSE", "-DMEMLIM=12000", "-o", "pan", "pan.c")
        said = run("./pan", "-w26", "-m1000000")
    if "errors: 0" in said and ("Search not completed" in said or "max search depth too small" in said):
        raise RuntimeError(f"The search was not finished:\n{said}")
    error = re.search(r"pan:1: (.*?) \(at depth", said)
    states = re.search(r"([\d.e+]+) states, stored", said)
    return Found(int(float(states[1])) if states else 0, error[1] if error else None)


def main() -> int:
    """Search all, and say what was found; the number of surprises is the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also with three clients")
    options = parser.parse_args()
    if not (shutil.which("spin") and shutil.which("gcc")):
        print("This needs spin and gcc. On Debian: apt-get install spin gcc")
        return 1
    surprises = 0
    for what, flags in SETTINGS.items():
        found = search([*flags, "N=2"])
        surprises += found.error is not None
        print(f"{found.error or 'holds':40}  {found.states:>12,} states  {what}", flush=True)
    if options.all:
        found = search(["N=3"])
        surprises += found.error is not None
        print(f"{found.error or 'holds':40}  {found.states:>12,} states  three clients", flush=True)
    for bug, flags in BUGS.items():
        found = search([f"BUG_{bug}", *(flags if "N=3" in flags else [*flags, "N=2"])])
        surprises += found.error is None
        print(f"{'found out' if found.error else 'NOT FOUND OUT':40}  {found.states:>12,} states  {bug}", flush=True)
    return surprises


if __name__ == "__main__":
    sys.exit(main())
