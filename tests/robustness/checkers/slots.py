"""Check schedules: each slot is decided once, none is lost, outcomes are in order, and no stale run has an effect.

The history has what each run began with, and what each call returned. The final state has the database's ledger and the
effects in the order in which they were accepted. If the database has forgotten decisions, a slot may run again, and the
ledger does not have every run.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

from tests.robustness.checkers import Finding, make_finding
from tests.robustness.history.record import History, Operation

AT_MOST_ONCE = ("most", "queue")
"""The schedules of the workload whose slots never run again."""

AT_LEAST_ONCE = ("least", "all", "delay")
"""The schedules of the workload whose slots run again after a death."""

CAUGHT_UP = {"all": 1.0}
"""The schedules of the workload that run every slot, with the seconds between two slots."""

Bad = list[tuple[Operation, str]]


def check(history: History) -> Finding:
    """Compare the runs, the ledger and the effects of each schedule."""
    bad: Bad = []
    ledger = history.by_key("ledger")
    began = history.by_key("began")
    for runs in began.values():
        bad += _repeated_tokens(runs)
    for name, rows in ledger.items():
        bad += _lost(name, rows) + _decided_twice(rows) + _out_of_turn(rows, history.clock_was_set)
    if not history.state_was_lost:
        for name, runs in began.items():
            bad += _repeated(name, runs)
    if ledger and not history.state_was_lost:
        bad += _forgotten(history.of("call"), ledger) + _unknown_runs(began, ledger)
    for stored in history.by_key("stored").values():
        bad += _stale_effects(stored)
    checked = len(history.of("began")) + len(history.of("ledger"))
    return make_finding("slots", history, checked, bad)


def _repeated_tokens(runs: list[Operation]) -> Bad:
    """Return runs that had the token of another run."""
    tokens = Counter(one.token for one in runs)
    return [(one, f"two runs had token {one.token}") for one in runs if tokens[one.token] > 1]


def _repeated(name: str, runs: list[Operation]) -> Bad:
    """Return runs of a slot that has run already, although its schedule runs each slot once."""
    times = Counter(one.details["slot"] for one in runs)
    bad: Bad = []
    if name in AT_MOST_ONCE:
        bad += [
            (one, f"slot {one.details['slot']} ran {times[one.details['slot']]} times")
            for one in runs
            if times[one.details["slot"]] > 1
        ]
    by_slot: dict[str, list[Operation]] = defaultdict(list)
    for one in sorted(runs, key=lambda one: one.token):
        by_slot[one.details["slot"]].append(one)
    for same in by_slot.values():
        for before, after in itertools.pairwise(same):
            if after.details["nth"] <= before.details["nth"]:
                bad.append((after, "a later run of the slot does not have the higher number"))
    return bad


def _decided_twice(rows: list[Operation]) -> Bad:
    """Return rows of the ledger that decide a slot again. Only a run after a death may."""
    bad: Bad = []
    decided = sorted((one for one in rows if one.details["nth"] <= 1), key=lambda one: float(one.details["slot"]))
    for before, after in itertools.pairwise(decided):
        if after.details["slot"] <= before.details["last_slot"]:
            bad.append((after, f"its slot was decided already: {before}"))
    runs = {(one.details["slot"], one.details["nth"]): one for one in rows if one.token}
    for (slot, number), one in runs.items():
        if number > 1:
            earlier = runs.get((slot, number - 1))
            if earlier is not None and earlier.details["recorded"] != "died":
                bad.append((one, f"runs again after a run that ended as {earlier.details['recorded']}"))
    return bad


def _lost(name: str, rows: list[Operation]) -> Bad:
    """Return runs whose slot should have run again after their death, and runs after slots that were passed over."""
    bad: Bad = []
    runs = {(one.details["slot"], one.details["nth"]) for one in rows}
    if name in AT_LEAST_ONCE:
        bad += [
            (one, "died, and its slot did not run again")
            for one in rows
            if one.details["recorded"] == "died" and (one.details["slot"], one.details["nth"] + 1) not in runs
        ]
    if name in CAUGHT_UP:
        decided = sorted((one for one in rows if one.details["nth"] <= 1), key=lambda one: float(one.details["slot"]))
        for before, after in itertools.pairwise(decided):
            if after.details["slot"] - before.details["last_slot"] > 1.5 * CAUGHT_UP[name]:
                bad.append((after, f"slots before it were passed over, after {before}"))
    return bad


def _out_of_turn(rows: list[Operation], clock_was_set: bool) -> Bad:
    """Return runs that were claimed before the run before them had an outcome."""
    bad: Bad = []
    runs = sorted((one for one in rows if one.token), key=lambda one: one.token)
    for before, after in itertools.pairwise(runs):
        ended = before.details["ended_at"]
        if before.details["recorded"] is None or ended is None:
            bad.append((after, f"was granted while the run before it has no outcome: {before}"))
        elif not clock_was_set and ended > after.details["claimed_at"] + 1e-6:
            bad.append((after, f"was granted before the run before it ended: {before}"))
    return bad


def _forgotten(calls: list[Operation], ledger: dict[str, list[Operation]]) -> Bad:
    """Return calls that returned a result which the ledger does not have as succeeded."""
    recorded = {(name, one.token): one.details["recorded"] for name, rows in ledger.items() for one in rows}
    oldest = {name: min((one.token for one in rows if one.token), default=0) for name, rows in ledger.items()}
    return [
        (one, f"returned a result, but is recorded as {recorded.get((one.key, one.token))}")
        for one in calls
        if one.ok
        and "token" in one.details
        # The ledger keeps the newest rows.
        and one.token >= oldest.get(one.key, 0)
        and recorded.get((one.key, one.token)) != "succeeded"
    ]


def _unknown_runs(began: dict[str, list[Operation]], ledger: dict[str, list[Operation]]) -> Bad:
    """Return runs that began without a row in the ledger."""
    bad: Bad = []
    for name, runs in began.items():
        tokens = {one.token for one in ledger.get(name, [])}
        oldest = min((token for token in tokens if token), default=0)
        bad += [
            (one, "began, but is not in the ledger") for one in runs if one.token >= oldest and one.token not in tokens
        ]
    return bad


def _stale_effects(stored: list[Operation]) -> Bad:
    """Return effects that were accepted after the effect of a later run."""
    ordered = sorted(stored, key=lambda one: int(one.details["order"]))
    return [
        (after, f"was accepted after token {before.token}")
        for before, after in itertools.pairwise(ordered)
        if after.token < before.token
    ]
