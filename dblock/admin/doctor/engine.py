"""Check that the server behaves as dblock needs, and name what is weaker where it does not."""

from __future__ import annotations

from collections.abc import Iterator

from dblock.admin.doctor.patient import Finding, Patient, server_check
from dblock.admin.probe import Outcome, probe
from dblock.errors import DatabaseError

CERTIFY = "dblock certify"


@server_check
def behaviour(patient: Patient) -> Iterator[Finding]:
    """Try with two sessions each behaviour that dblock cannot do without."""
    for one in _outcomes(patient):
        if one.required and one.holds is False:
            yield Finding(
                "error",
                f"The server does not behave as Postgres does ({one.id}): {one.seen}.",
                f"{one.without} dblock's guarantees do not hold here.",
                f"Move dblock to a Postgres server. {CERTIFY} shows everything that holds on this one.",
            )


@server_check
def address_translation(patient: Patient) -> Iterator[Finding]:
    """Check that both ends of the connection are the same for the client and for the server."""
    ((backend,),) = patient.rows("SELECT pg_backend_pid()")
    if backend == patient.link.connection.info.backend_pid:  # otherwise it is a pooler, which has a check of its own
        yield from _weaker(
            patient, "direct-connection", "dblock.Client(dsn, listen_dsn='postgresql://…') (docs/concepts/waiting.md)."
        )


def _weaker(patient: Patient, behaviour: str, fix: str) -> Iterator[Finding]:
    for one in _outcomes(patient):
        if one.id == behaviour and one.holds is False:
            yield Finding("warning", f"{one.seen[0].upper()}{one.seen[1:]}.", one.without, fix)


def _outcomes(patient: Patient) -> list[Outcome]:
    """Run the probe once for all checks. It writes nothing."""
    if patient.outcomes is None:
        patient.end_transaction()
        try:
            patient.outcomes = probe(patient.link.target, patient.schema, read_only=True)
        except DatabaseError:
            # A second session is not available, for example because no connection is free. Other checks report that.
            if patient.link.connection.broken:
                raise
            patient.outcomes = []
    return patient.outcomes


CHECKS = (behaviour, address_translation)
