"""The certificate: which guarantees hold on this database, which are weaker here, and why.

Guarantee: a guarantee is said to hold only if every behaviour and every trial behind it succeeded in this run. What
could not be tried makes it unknown, never held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from dblock.admin.probe import Outcome, probe
from dblock.cli.certify.facts import Facts, read_facts, way_to
from dblock.cli.certify.stage import schema_for_trials
from dblock.cli.certify.trials import GRANT, TAKEOVER, TRIALS, Failed, Figures, Trial
from dblock.errors import AccessDenied, DblockError, InvalidArgument

if TYPE_CHECKING:
    from dblock._runtime.target import Target

HOLDS, WEAKER, FAILS, UNKNOWN = "holds", "weaker", "fails", "unknown"

LONGEST = 28.0
"""Seconds after which no further trial begins."""


@dataclass(frozen=True)
class TrialOutcome:
    """What one trial with real clients showed."""

    id: str
    what: str
    holds: bool | None
    """None if it was not run."""
    seen: str
    """What happened instead, or why it was not run; empty if it succeeded."""
    figures: Figures
    seconds: float


@dataclass(frozen=True)
class Guarantee:
    """One guarantee, and whether it holds here."""

    id: str
    what: str
    state: str
    """One of: holds, weaker, fails, unknown."""
    why: str
    """Why it does not hold, or is weaker; empty if it holds."""
    accepted: bool = False
    """Whether the operator has accepted that it does not hold."""


@dataclass(frozen=True)
class Certificate:
    """What holds on one database."""

    database: str
    facts: Facts
    behaviours: list[Outcome]
    trials: list[TrialOutcome]
    guarantees: list[Guarantee]
    seconds: float

    @property
    def complete(self) -> bool:
        """Whether every guarantee holds that the operator has not accepted to be weaker."""
        return all(one.state == HOLDS or one.accepted for one in self.guarantees)


@dataclass(frozen=True)
class _Definition:
    """A guarantee of the protocol, and the behaviours and trials that it rests on."""

    id: str
    what: str
    rests_on: tuple[str, ...]
    weakens: bool = False
    """Whether dblock works without it, only worse."""


GUARANTEES = (
    _Definition(
        "exclusion",
        "At most one client holds a lock.",
        ("row-lock", "read-committed", "advisory-lock", "advisory-shared", "clock", "grant", "contention"),
    ),
    _Definition(
        "token-order", "Token order is grant order.", ("sequence", "row-lock", "table-lock", "grant", "contention")
    ),
    _Definition(
        "tokens-after-failover",
        "Tokens rise across failovers and restores, while the clocks of the nodes agree.",
        ("sequence", "clock", "server-start"),
    ),
    _Definition("one-clock", "Only the database's clock decides.", ("clock", "expiry")),
    _Definition("exact-release", "Release and renew act on one exact grant.", ("read-committed", "late-release")),
    _Definition("loss", "A holder learns of a loss before the next grant.", ("cut-off", "clock")),
    _Definition("sessions", "A lease without presence does not depend on a session.", ("cut-session",)),
    _Definition("durability", "A grant that was acknowledged survives a crash.", ("synchronous-commit",)),
    _Definition("queue", "A waiter gets the lock when its turn comes.", ("hand-over", "expiry")),
    _Definition("wake-ups", "A release wakes the next waiter at once.", ("notification", "hand-over"), True),
    _Definition(
        "presence",
        "The lock of a dead process is granted long before its lease expires.",
        ("advisory-lock", "advisory-shared", "session-end", "unlogged-table", "direct-connection", "takeover"),
        True,
    ),
    _Definition("fence", "A fence refuses a stale token.", ("table-lock", "stale-write")),
)


def certify(
    target: Target, *, accept: Collection[str] = (), on_trial: Callable[[str], object] = lambda trial: None
) -> Certificate:
    """Try everything on this database, in a schema of its own that is dropped at the end."""
    _check_ids(accept)
    started = time.monotonic()
    on_trial("the server")
    facts = read_facts(target)
    outcomes: list[Outcome] = []
    trials: list[TrialOutcome] = []
    if facts.connection != "standby":
        try:
            outcomes = probe(target, on_trial=on_trial)
        except AccessDenied as error:
            raise AccessDenied(
                "dblock certify creates a schema for its trials, and this role may not create one. Let a role with "
                "CREATE on the database run it, or run: GRANT CREATE ON DATABASE … TO …"
            ) from error
        facts = replace(facts, connection=way_to(facts, outcomes))
        if any(one.required and one.holds is False for one in outcomes):
            trials = [_not_run(trial, "the server does not behave as Postgres does") for trial in TRIALS]
        else:
            trials = _run_all(target, facts, started, on_trial)
    else:
        trials = [_not_run(trial, "the server is a standby, which grants nothing") for trial in TRIALS]
    guarantees = [
        replace(one, accepted=one.id in accept and one.state != HOLDS) for one in _judge(facts, outcomes, trials)
    ]
    return Certificate(str(target), facts, outcomes, trials, guarantees, time.monotonic() - started)


def _check_ids(accepted: Collection[str]) -> None:
    known = [definition.id for definition in GUARANTEES]
    for one in accepted:
        if one not in known:
            near = get_close_matches(one, known, 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"They are: {', '.join(known)}."
            raise InvalidArgument(f"There is no guarantee {one!r} to accept. {hint}")


def _run_all(target: Target, facts: Facts, started: float, on_trial: Callable[[str], object]) -> list[TrialOutcome]:
    found: list[TrialOutcome] = []
    on_trial("the install")
    with schema_for_trials(target) as schema:
        for trial in TRIALS:
            if trial is TAKEOVER and facts.connection != "direct":
                found.append(_not_run(trial, f"clients have no presence here ({facts.connection})"))
            elif found and found[0].id == GRANT.id and not found[0].holds:
                found.append(_not_run(trial, "no lock was granted"))
            elif time.monotonic() - started > LONGEST:
                found.append(_not_run(trial, f"{LONGEST:g} s had passed"))
            else:
                on_trial(trial.id)
                found.append(_run(trial, target, schema))
        on_trial("the removal of the schema")
    return found


def _run(trial: Trial, target: Target, schema: str) -> TrialOutcome:
    import psycopg

    started = time.perf_counter()
    figures: Figures = {}
    holds, seen = True, ""
    try:
        figures = trial.run(target, schema)
    except Failed as failure:
        holds, seen = False, str(failure)
    except (DblockError, psycopg.Error) as error:
        holds, seen = False, f"{type(error).__name__}: {error}".splitlines()[0]
    return TrialOutcome(trial.id, trial.what, holds, seen, figures, time.perf_counter() - started)


def _not_run(trial: Trial, why: str) -> TrialOutcome:
    return TrialOutcome(trial.id, trial.what, None, why, {}, 0.0)


def _judge(facts: Facts, outcomes: list[Outcome], trials: list[TrialOutcome]) -> list[Guarantee]:
    shown = {one.id: (one.holds, one.seen, one.without) for one in outcomes}
    shown |= {one.id: (one.holds, one.seen, "") for one in trials}
    guarantees = []
    for definition in GUARANTEES:
        state, why = HOLDS, ""
        for name in definition.rests_on:
            holds, seen, without = shown.get(name, (None, "it was not tried", ""))
            if holds is False:
                state, why = WEAKER if definition.weakens else FAILS, f"{seen.rstrip('.')}. {without}".strip()
                break
            if holds is None and state == HOLDS:
                state, why = UNKNOWN, f"{name} could not be tried: {seen}"
        if state == HOLDS and definition.id == "durability":
            state, why = _durability(facts)
        if definition.id == "wake-ups" and state in (HOLDS, UNKNOWN):
            state, why = _wake_ups(trials, state, why)
        guarantees.append(Guarantee(definition.id, definition.what, state, why))
    return guarantees


def _durability(facts: Facts) -> tuple[str, str]:
    if not facts.fsync:
        return FAILS, "fsync is off: a crash of the machine loses grants."
    waits = facts.synchronous_standby_names
    if facts.standbys and not waits:
        return WEAKER, (
            "no commit waits for the attached standbys: a failover can lose grants. Tokens still rise, so fences hold."
        )
    return HOLDS, ""


def _wake_ups(trials: list[TrialOutcome], state: str, why: str) -> tuple[str, str]:
    by = next((one.figures.get("by") for one in trials if one.id == "hand-over"), None)
    if by == "polling":
        return WEAKER, "notifications do not come through, so waiters poll several times a second. Set listen_dsn."
    return (HOLDS, "") if by == "notifications" else (state, why)
