"""Whether tokens can only rise: the sequence as it was made, and not behind anything that has seen its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dblock._core.options import quoted
from dblock.admin.doctor.patient import CannotCheck, Check, Finding, Patient

MOST = 2**63 - 1


def token_cache(patient: Patient) -> Iterator[Finding]:
    """Look whether sessions hoard tokens."""
    cache = _sequence(patient, "seqcache")
    if cache != 1:
        yield Finding(
            "error",
            f"The token sequence has CACHE {cache}.",
            "Each session keeps tokens for later, and hands out old ones after others have handed out newer: the "
            "fence then refuses the rightful holder.",
            # Raising restarts the sequence, and that makes every session forget what it has kept.
            f"{_alter(patient)} CACHE 1; then: {patient.run('token raise --above', '0')}",
        )


def token_cycle(patient: Patient) -> Iterator[Finding]:
    """Look whether tokens may start over."""
    if _sequence(patient, "seqcycle"):
        yield Finding(
            "error",
            "The token sequence has CYCLE.",
            "At its end tokens start over, and pass no fence.",
            f"{_alter(patient)} NO CYCLE;",
        )


def token_increment(patient: Patient) -> Iterator[Finding]:
    """Look whether tokens rise by one."""
    step = _sequence(patient, "seqincrement")
    if step != 1:
        yield Finding(
            "error",
            f"The token sequence has INCREMENT {step}.",
            "Tokens fall: every new holder is refused by the fence."
            if step < 0
            else "Tokens are used up faster than was reckoned with, and what raises them counts in ones.",
            f"{_alter(patient)} INCREMENT 1;",
        )


def token_maximum(patient: Patient) -> Iterator[Finding]:
    """Look whether tokens end too soon."""
    most = _sequence(patient, "seqmax")
    kind = _sequence(patient, "format_type(seqtypid, NULL)")
    if most < MOST or kind != "bigint":
        yield Finding(
            "error",
            f"The token sequence is of type {kind} and ends at {most}.",
            "Nothing can be granted after that; and a failover, which takes tokens 2^40 ahead, may well go past it.",
            f"{_alter(patient)} AS bigint MAXVALUE {MOST};",
        )


def token_below_locks(patient: Patient) -> Iterator[Finding]:
    """Look whether a lock has a token that is still to come."""
    # The sequence is read at its newest, and the locks as of the statement's beginning: no grant can come between.
    locks = patient.within("distributed_locks")
    ((highest, seen),) = patient.rows(
        f"SELECT {_highest(patient)}, (SELECT coalesce(max(l.token), 0) FROM {locks} AS l)"
    )
    if seen > highest:
        yield _below(patient, f"Lock rows have token {seen}", highest, seen)


def token_below_store(patient: Patient) -> Iterator[Finding]:
    """Look whether a fence in this database has seen a token that is still to come."""
    from psycopg.errors import InsufficientPrivilege

    there = patient.rows(
        "SELECT 1 FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace"
        " WHERE n.nspname = $1 AND p.proname = 'high_water' AND p.pronargs = 0",
        patient.fences,
    )
    if not there:
        return
    try:
        ((seen,),) = patient.rows(f"SELECT {quoted(patient.fences)}.high_water()")
    except InsufficientPrivilege:
        raise CannotCheck(f"the rights of the owner of {patient.fences} and of the tables that it protects") from None
    # After the fences, so that no grant can come between.
    ((highest,),) = patient.rows(f"SELECT {_highest(patient)}")
    if seen > highest:
        yield _below(patient, f"The fences in schema {patient.fences!r} have seen token {seen}", highest, seen)


def _below(patient: Patient, what: str, highest: int, seen: int) -> Finding:
    return Finding(
        "error",
        f"{what}, and the highest that was handed out is {highest or 'none'}.",
        "Tokens went back, as after a restore: until they have risen past that, new holders are refused and late "
        "writers are not. (Unless those tokens are another lock service's.)",
        patient.run("token raise --above", str(seen)),
    )


def _highest(patient: Patient) -> str:
    return (
        "(SELECT CASE WHEN s.is_called THEN s.last_value ELSE s.last_value - 1 END"
        f" FROM {patient.within('token_sequence')} AS s)"
    )


def _sequence(patient: Patient, what: str) -> Any:
    """Return something of how the sequence was made, which anybody may see."""
    return patient.rows(
        f"SELECT {what} FROM pg_sequence AS s JOIN pg_class AS c ON c.oid = s.seqrelid"
        " WHERE c.relnamespace = $1 AND c.relname = 'token_sequence'",
        patient.oid,
    )[0][0]


def _alter(patient: Patient) -> str:
    return f"ALTER SEQUENCE {patient.within('token_sequence')}"


CHECKS = tuple(
    Check(find)
    for find in (token_cache, token_cycle, token_increment, token_maximum, token_below_locks, token_below_store)
)
