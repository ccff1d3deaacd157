"""Search the model: the protocol must hold in every setting, and every seeded bug must violate it.

python spec/check.py            every setting and every bug
python spec/check.py --quick    with two clients: a first check of a change to the model
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent

MEMORY = 6000
"""Megabytes that a search may take."""


class Setting(NamedTuple):
    """The events that can happen in one search."""

    what: str
    flags: str
    clients: int = 3
    kind: str = "states"
    """`states`: every state is visited. `ends`: every run ends. `served`: no waiter waits forever in endless runs."""
    model: str = "dblock.pml"


def shared(what: str, flags: str, clients: int = 3, kind: str = "states") -> Setting:
    """Return a setting of the model of shared locks: a read-write lock, or with PERMITS a semaphore."""
    return Setting(what, flags, clients, kind, "shared.pml")


SETTINGS = (
    Setting("ask, hold, renew, write, release; lost replies; the reaper", ""),
    Setting("the same with claims", "CLAIMS"),
    Setting("each wants the lock twice", "CLAIMS ROUNDS=2"),
    Setting("a longer ttl", "CLAIMS TTL=3"),
    Setting("clients die, notifications are lost", "CLAIMS LOOKS CRASHES"),
    Setting("an operator forces a release", "CLAIMS FORCE"),
    Setting("an operator frees the lock at once", "CLAIMS FORCE_NOW"),
    Setting("waiters leave and die", "CLAIMS LEAVES CRASHES"),
    Setting("paused waiters lose their tickets", "CLAIMS PAUSES CRASHES"),
    Setting("all of that", "CLAIMS LOOKS CRASHES FORCE PAUSES LEAVES"),
    Setting("a standby that is behind is promoted", "CLAIMS LOOKS CRASHES PROMOTES"),
    Setting("the same without claims", "LOOKS PROMOTES"),
    Setting("a second standby is promoted that never saw the first", "LOOKS SIBLINGS"),
    Setting("a frozen primary returns after a promotion", "LOOKS FLIPS_BACK"),
    Setting("a synchronous standby is promoted", "CLAIMS LOOKS CRASHES PROMOTES_IN_STEP"),
    Setting("the server crashes and recovers", "CLAIMS LOOKS CRASHES FORCE RECOVERS"),
    Setting("sessions of live clients are closed", "PRESENCE"),
    Setting("the same, and clients die", "PRESENCE CRASHES"),
    Setting("sessions are closed, and the server restarts", "PRESENCE RESTARTS"),
    Setting("all of that, with a longer grace", "PRESENCE CRASHES RESTARTS TTL=3 GRACE=2 OWN_PART=1", clients=2),
    Setting("holders begin and end terms of an election", "TERMS NO_WRITES"),
    Setting("each leads twice", "TERMS NO_WRITES ROUNDS=2"),
    Setting("candidates die, and an operator forces a release", "TERMS NO_WRITES LOOKS CRASHES FORCE"),
    Setting("the server of an election crashes and recovers", "TERMS NO_WRITES LOOKS CRASHES RECOVERS"),
    Setting("its standby that is behind is promoted", "TERMS NO_WRITES LOOKS PROMOTES"),
    Setting("its synchronous standby is promoted", "TERMS NO_WRITES LOOKS CRASHES PROMOTES_IN_STEP"),
    Setting("sessions of candidates are closed", "TERMS PRESENCE CRASHES", clients=2),
    Setting(
        "nothing is counted: any number of rounds, renewals, deaths",
        "UNBOUNDED CLAIMS LOOKS CRASHES FORCE PAUSES LEAVES",
    ),
    Setting("nothing is counted, and the server recovers", "UNBOUNDED CLAIMS LOOKS CRASHES RECOVERS"),
    Setting("nothing is counted, with presence", "UNBOUNDED PRESENCE CRASHES RESTARTS", clients=2),
    Setting("every run ends", "CLAIMS", kind="ends"),
    Setting("every run ends", "CLAIMS LOOKS CRASHES FORCE PAUSES LEAVES", kind="ends"),
    Setting("every run ends", "CLAIMS LOOKS CRASHES PROMOTES", clients=2, kind="ends"),
    Setting("every run ends", "PRESENCE CRASHES RESTARTS", clients=2, kind="ends"),
    Setting("every waiter is served, in endless runs", "CLAIMS", kind="served"),
    Setting("every waiter is served, in endless runs", "CLAIMS LOOKS CRASHES FORCE", clients=2, kind="served"),
    shared("readers and writers ask, hold, renew, release; lost replies", "READERS"),
    shared("writers become readers", "READERS DOWNGRADES"),
    shared("the same, and clients leave and die", "READERS DOWNGRADES LEAVES CRASHES", clients=2),
    shared("waiters leave", "READERS LEAVES"),
    shared("clients die", "READERS CRASHES"),
    shared("clients die, and notifications are lost", "READERS DOWNGRADES LOOKS CRASHES", clients=2),
    shared("open transactions have proved leases", "READERS DOWNGRADES PROVES CRASHES", clients=2),
    shared("two permits", "PERMITS=2"),
    shared("two permits, and clients leave and die", "PERMITS=2 LEAVES CRASHES"),
    shared("the number of permits changes", "PERMITS=2 RESIZES"),
    shared("open transactions have proved permits", "PERMITS=2 PROVES"),
    shared("one permit is a plain lock", "PERMITS=1 LEAVES CRASHES"),
    shared("every run ends", "READERS", kind="ends"),
    shared("every run ends", "READERS DOWNGRADES LEAVES CRASHES", clients=2, kind="ends"),
    shared("every run ends", "PERMITS=2 CRASHES", kind="ends"),
)

BUGS = {
    "TOKEN_EARLY": Setting("mints the token before the row is held", "", 2),
    "RELEASE_BY_NAME": Setting("frees the lock, whichever grant holds it", "", 2),
    "RENEW_REVIVES": Setting("extends a lease that has expired", "", 2),
    "KEEPALIVE_OUTLIVES_RELEASE": Setting("renews a released lease", "", 2),
    "TRUST_FROM_REPLY": Setting("counts trust from the reply instead of from the request", "", 2),
    "WHOLE_TTL_AGAIN": Setting("trusts a whole ttl when a retry finds its own older grant", "", 2),
    "LOST_WAKEUP": Setting("frees the lock and wakes no waiter", "", 2),
    "NO_RESERVE": Setting("grants a free lock ahead of its queue", "", 2),
    "REAPER_TAKES_LIVING": Setting("deletes a row that is held", "", 2),
    "REAPER_LOWERS_TOKENS": Setting("restarts the tokens when a row is deleted", "", 2),
    "NO_FENCE": Setting("accepts every write", "", 2),
    "NO_CLAIM": Setting("does not raise the fence with the grant", "CLAIMS", 2),
    "FORCE_FREES": Setting("frees a lock at once without telling its holder first", "FORCE", 2),
    "FORCED_IS_RENEWED": Setting("renews a holder that was told to release", "FORCE", 2),
    "NO_JUMP": Setting("continues the sequence where a promotion has left it", "PROMOTES", 2),
    "LEAP siblings": Setting("leaps by a fixed number at each start of a server", "SIBLINGS", 2),
    "LEAP flip-back": Setting("leaps by a fixed number at each start of a server", "FLIPS_BACK", 2),
    "ASYNC_GRANT_WITH_TOKEN": Setting("issues a token without waiting for the disk", "RECOVERS", 2),
    "EXPIRED_WAITER_GRANTED": Setting("redeems a ticket that was pruned", "PAUSES", 2),
    "LEAVES_ALONE": Setting("leaves the queue without waking the next waiter of a free lock", "LEAVES", 3),
    "PRESENCE_TAKES_LIVING": Setting("takes the lock of a client that is cut off, without a grace", "PRESENCE", 2),
    "PRESENCE_AFTER_RESTART": Setting("takes presences from before a restart for dead clients", "PRESENCE RESTARTS", 2),
    "DOUBT_IGNORED": Setting("trusts a lease though its session is closed", "PRESENCE", 2),
    "EXCUSE_UNHEARD": Setting("takes the lock of a client that has withdrawn its presence", "PRESENCE", 2),
    "EXCUSED_EARLY": Setting("trusts a grant whose session ended while the reply was in transit", "PRESENCE", 2),
    "BEGIN_UNPROVEN": Setting("begins a term whose token does not hold the lock", "TERMS NO_WRITES", 2),
    "TERM_LEFT_OPEN": Setting("begins a term and leaves an earlier one open", "TERMS NO_WRITES", 2),
    "OBSERVER_ENDS_LIVING": Setting("records the end of a term that has not ended", "TERMS NO_WRITES", 2),
    "LEADS_EARLY": Setting("leads before its term has begun", "TERMS NO_WRITES", 2),
    "ASYNC_TERM": Setting("begins a term without waiting for the disk", "TERMS NO_WRITES RECOVERS", 2),
    "LOST_WAKEUP forever": Setting("frees the lock and wakes no waiter", "", 2, "served"),
    "NO_RESERVE forever": Setting("grants a free lock ahead of its queue", "", 2, "served"),
    "POLLS": Setting("asks again and again without being woken", "", 2, "ends"),
    "HEAD_UNLOCKED readers": shared("decides before the head's row is locked", "READERS", 2),
    "HEAD_UNLOCKED permits": shared("decides before the head's row is locked", "PERMITS=1", 2),
    "TOKEN_EARLY shared": shared("mints the token before the head's row is locked", "READERS", 2),
    "WRITER_LOOKS_AT_ITS_SHARE": shared("lets a writer in beside readers", "READERS", 2),
    "READERS_OVERTAKE": shared("lets readers pass a writer that waits", "READERS"),
    "PERMITS_OVERTAKE": shared("grants a free permit ahead of the queue", "PERMITS=1"),
    "GRANTED_TWICE": shared("gives a retry a second share", "PERMITS=2", 2),
    "RELEASE_BY_NUMBER": shared("frees the share, whichever grant it has", "READERS", 2),
    "RENEW_BY_NUMBER": shared("extends the share, whichever grant it has", "READERS", 2),
    "TRUST_FROM_REPLY shared": shared("counts trust from the reply instead of from the request", "READERS", 2),
    "LOST_WAKEUP shared": shared("frees a share and wakes no waiter", "READERS", 2),
    "LOST_WAKEUP permits": shared("frees a permit and wakes no waiter", "PERMITS=1", 2),
    "WAKES_ONE readers": shared("wakes one of the readers that can enter together", "READERS"),
    "WAKES_ONE permits": shared("wakes one waiter, whatever number of permits is free", "PERMITS=2", 4),
    "LEAVES_ALONE shared": shared("leaves the queue without waking the readers behind it", "READERS LEAVES"),
    "PROVED_IGNORED": shared("grants a writer what open transactions of readers rely on", "READERS PROVES", 2),
    "DOWNGRADE_IN_TWO_STEPS": shared("releases, and then asks for a read lease", "READERS DOWNGRADES", 2),
    "DOWNGRADE_KEEPS_TOKEN": shared("gives the read lease the token of the write lease", "READERS DOWNGRADES", 2),
    "DOWNGRADE_REVIVES": shared("turns a lease that is over into a read lease", "READERS DOWNGRADES", 2),
    "DOWNGRADE_SILENT": shared("wakes no reader after a downgrade", "READERS DOWNGRADES", 2),
    "DOWNGRADE_TRUSTED": shared("trusts the write lease while the downgrade is in transit", "READERS DOWNGRADES", 2),
    "SHRINKING_IGNORED": shared("grants a permit that the smaller semaphore does not have", "PERMITS=2 RESIZES"),
    "GROWS_SILENTLY": shared("makes a semaphore larger and wakes no waiter", "PERMITS=2 RESIZES"),
}
"""Each seeded bug, and the setting that shows it."""

POSSIBLE = {
    "FIND_ITS_GRANT": Setting("a retry finds its own grant", "", 2),
    "WRITE_LATE": Setting("an old write is accepted if nothing was claimed or written since", "", 2),
    "TAKE_NEW_TICKET": Setting("a paused waiter wakes, finds the lock free, and takes a new ticket", "PAUSES", 3),
    "TAKE_FROM_THE_DEAD": Setting("a lock is taken from a dead client before its deadline", "PRESENCE CRASHES", 2),
    "TAKE_FROM_THE_LIVING": Setting(
        "a lock is taken from a live client that no longer trusts its lease", "PRESENCE", 2
    ),
    "READ_TOGETHER": shared("two readers trust the lock at the same time", "READERS", 2),
    "USE_ALL_PERMITS": shared("all permits are used at the same time", "PERMITS=2", 2),
    "KEEP_A_READER_OUT": shared("a reader waits behind a writer while readers hold the lock", "READERS"),
    "FIND_ITS_GRANT shared": shared("a retry finds its own share", "READERS", 2),
}
"""Events that must be possible. Otherwise the searches above would have nothing to find."""

VIOLATIONS = {
    "believers<=1": "two clients trust the lock",
    "row_token>newest": "a token does not rise",
    "||forgotten": "held after it was released",
    "||(row_left>0)": "a renewal revives",
    "!(row_forced)": "renewed though told to release",
    "queued==0": "granted out of turn",
    "under[i]>=fence": "a write below an accepted one",
    "under[i]>=newest": "a write below a claim",
    "row_token==under[i]": "the grant of another client is released",
    "open_term==under[k]": "a leader whose term is not open",
    "open_term==0": "a term begins before the last one has ended",
    "under[i]>last_term": "a term begins out of order",
    "at[0]==5": "a waiter is left waiting",
    "(writers==0)||": "a writer is not alone",
    "readers<=": "more permits are used than there are",
    "early[": "a token does not rise",
    "sequence>newest": "a token does not rise",
    "(share_of[k]!=(i+1))": "granted twice",
    "held<permits": "more permits are granted than there are",
    "ahead<(permits": "a permit is granted out of turn",
    "ahead==0": "granted out of turn",
    "between[k]": "a writer enters while another one becomes a reader",
    "!(readers)||notices": "a waiter is forgotten",
    "(share_token[share[i]]==under[i])": "a renewal extends the grant of another client",
    "share_of[share[i]]==(i+1)": "the grant of another client is released",
    "(share_token[0]==under[i])&&": "a downgrade revives",
    "acceptance cycle": "a waiter waits forever",
    "non-progress cycle": "a run does not end",
}
"""Part of spin's message for each assertion, and its meaning."""


class Found(NamedTuple):
    """The result of a search."""

    states: int
    seconds: float
    megabytes: float
    error: str | None
    """The violated assertion, or None."""


def search(setting: Setting, *more: str) -> Found:
    """Visit every state of the model in this setting, or stop at the first error."""
    flags = [f"N={setting.clients}", *setting.flags.split(), *more]
    built, run = ["-DSAFETY"], []
    if setting.kind == "ends":
        built, run = ["-DNP"], ["-l"]
    if setting.kind == "served":
        # Fairness tells processes apart, so clients are not sorted. The other searches check the assertions.
        flags.append("ENDLESS")
        built, run = ["-DNFAIR=3"], ["-a", "-f", "-A", "-N", "served"]
    else:
        flags.append("SORTED")
    with tempfile.TemporaryDirectory() as folder:

        def call(*command: str) -> str:
            return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout

        call("spin", "-a", *(f"-D{flag}" for flag in flags), str(FOLDER / setting.model))
        # The partial order reduction does not know what canonical.pml changes.
        call("gcc", "-w", "-O1", "-DNOREDUCE", "-DVECTORSZ=512", f"-DMEMLIM={MEMORY}", *built, "-o", "pan", "pan.c")
        began = time.monotonic()
        said = call("./pan", "-w20", "-m1000000", *run)
        seconds = time.monotonic() - began
    error = re.search(r"pan:1: (.*?) \(at depth", said)
    if not error and ("errors: 0" not in said or "Search not completed" in said or "depth too small" in said):
        raise RuntimeError(f"The search was not finished:\n{said}")
    states = re.search(r"([\d.e+]+) states, stored", said)
    megabytes = re.search(r"([\d.]+)\s+total actual memory usage", said)
    violated = _named(error[1]) if error else None
    return Found(int(float(states[1])) if states else 0, seconds, float(megabytes[1]) if megabytes else 0.0, violated)


def _named(error: str) -> str:
    return next((name for words, name in VIOLATIONS.items() if words in error), error)


def seeded(bug: str) -> Found:
    """Search with this bug."""
    setting = BUGS[bug]
    return search(setting, f"BUG_{bug.split()[0]}")


def main() -> int:
    """Run all searches and print the results. The exit code is the number of unexpected ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="with two clients")
    options = parser.parse_args()
    if not (shutil.which("spin") and shutil.which("gcc")):
        print("This needs spin and gcc. On Debian: apt-get install spin gcc")
        return 1
    surprises = 0

    def say(what: str, setting: Setting, found: Found, verdict: str) -> None:
        figures = f"{setting.clients} | {found.states:,} | {found.seconds:.1f} | {found.megabytes:.0f}"
        print(f"| {what} | {figures} | {verdict} |", flush=True)

    print("| setting | clients | states | seconds | MB | verdict |\n|---|---|---|---|---|---|", flush=True)
    for setting in SETTINGS:
        if options.quick:
            setting = setting._replace(clients=2)
        found = search(setting)
        surprises += found.error is not None
        say(f"{setting.what}: `{setting.flags or '-'}`", setting, found, found.error or "holds")
    unseen = set(VIOLATIONS.values())
    for bug, setting in BUGS.items():
        found = seeded(bug)
        surprises += found.error is None
        unseen.discard(found.error or "")
        say(f"`{bug}`: {setting.what}", setting, found, found.error or "NOT FOUND OUT")
    for name, setting in POSSIBLE.items():
        found = search(setting, f"CAN_{name.split()[0]}")
        surprises += found.error is None
        say(setting.what, setting, found, "possible" if found.error else "IMPOSSIBLE")
    for name in unseen:
        surprises += 1
        print(f"No seeded bug violates this assertion: {name}")
    return surprises


if __name__ == "__main__":
    sys.exit(main())
