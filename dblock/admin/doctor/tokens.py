"""Check that tokens can only rise: the sequence is unaltered, and not behind any token that was seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dblock._core.options import quoted
from dblock.admin.doctor.patient import CannotCheck, Check, Finding, Patient

MOST = 2**63 - 1


def token_cache(patient: Patient) -> Iterator[Finding]:
    """Check that sessions do not cache tokens."""
    cache = _sequence(patient, "seqcache")
    if cache != 1:
        yield Finding(
            "error",
            f"The token sequence has CACHE {cache}.",
            "Each session caches tokens and issues old ones after other sessions have issued newer: the fence then "
            "refuses the rightful holder.",
            # Raising restarts the sequence, which makes every session drop its cached tokens.
            f"{_alter(patient)} CACHE 1; then: {patient.run('token raise --above', '0')}",
        )


def token_cycle(patient: Patient) -> Iterator[Finding]:
    """Check that tokens cannot start over."""
    if _sequence(patient, "seqcycle"):
        yield Finding(
            "error",
            "The token sequence has CYCLE.",
            "At the end of the sequence tokens start over, and no fence accepts them.",
            f"{_alter(patient)} NO CYCLE;",
        )


def token_increment(patient: Patient) -> Iterator[Finding]:
    """Check that tokens rise by one."""
    step = _sequence(patient, "seqincrement")
    if step != 1:
        yield Finding(
            "error",
            f"The token sequence has INCREMENT {step}.",
            "Tokens fall: every new holder is refused by the fence."
            if step < 0
            else "Tokens are used up faster than planned, and `token raise` assumes steps of one.",
            f"{_alter(patient)} INCREMENT 1;",
        )


def token_maximum(patient: Patient) -> Iterator[Finding]:
    """Check that the sequence does not end too soon."""
    most = _sequence(patient, "seqmax")
    kind = _sequence(patient, "format_type(seqtypid, NULL)")
    if most < MOST or kind != "bigint":
        yield Finding(
            "error",
            f"The token sequence is of type {kind} and ends at {most}.",
            "Nothing can be granted after that, and a failover, which moves tokens 2^40 ahead, may go past it.",
            f"{_alter(patient)} AS bigint MAXVALUE {MOST};",
        )


def token_below_locks(patient: Patient) -> Iterator[Finding]:
    """Check that no lock has a token that the sequence has not issued yet."""
    # The sequence is read as it is now, the locks as of the statement's start, so no grant can come between.
    locks = patient.within("distributed_locks")
    ((highest, seen),) = patient.rows(
        f"SELECT {_highest(patient)}, (SELECT coalesce(max(l.token), 0) FROM {locks} AS l)"
    )
    if seen > highest:
        yield _below(patient, f"Lock rows have token {seen}", highest, seen)


def token_below_store(patient: Patient) -> Iterator[Finding]:
    """Check that no fence in this database has seen a token that the sequence has not issued yet."""
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
        raise CannotCheck(
            f"the privileges of the owner of {patient.fences} and of the tables that it protects"
        ) from None
    # Read after the fences, so that no grant can come between.
    ((highest,),) = patient.rows(f"SELECT {_highest(patient)}")
    if seen > highest:
        yield _below(patient, f"The fences in schema {patient.fences!r} have seen token {seen}", highest, seen)


def _below(patient: Patient, what: str, highest: int, seen: int) -> Finding:
    return Finding(
        "error",
        f"{what}, but the highest issued token is {highest or 'none'}.",
        "Tokens went back, as after a restore. Until they have risen past that token, fences refuse new holders and "
        "accept late writers. (If those tokens come from another lock service, ignore this.)",
        patient.run("token raise --above", str(seen)),
    )


def _highest(patient: Patient) -> str:
    return (
        "(SELECT CASE WHEN s.is_called THEN s.last_value ELSE s.last_value - 1 END"
        f" FROM {patient.within('token_sequence')} AS s)"
    )


def _sequence(patient: Patient, what: str) -> Any:
    """Return a property of the token sequence; any login may read it."""
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
