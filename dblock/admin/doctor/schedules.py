"""Find schedules that no host runs: the dead man's switch."""

from __future__ import annotations

from collections.abc import Iterator

from dblock._core.options import quoted
from dblock.admin.doctor.patient import Check, Finding, Patient, duration

SHOWN = 5


def overdue_schedule(patient: Patient) -> Iterator[Finding]:
    """Find schedules whose slot and grace have passed without a claim, or whose run did not report its end."""
    for name, since, age, last in patient.rows(
        "SELECT s.name, to_char(s.overdue_since AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS UTC'),"
        " date_part('epoch', clock_timestamp() - s.overdue_since), s.last_run ->> 'holder'"
        f" FROM {quoted(patient.schema)}.list_schedules(NULL, 1) AS s"
        f" WHERE s.overdue_since IS NOT NULL ORDER BY s.overdue_since LIMIT {SHOWN}"
    ):
        ran = "It has not run yet." if last is None else f"Its last run was on {last}."
        yield Finding(
            "warning",
            f"Schedule {name!r} is overdue since {since}, {duration(age)} ago. {ran}",
            "No host calls this schedule, its runner died, or the server's clock was set back behind slots that are"
            " decided. The work of the schedule is not done.",
            f"Start a host that calls the schedule. See: {patient.run('schedules', '--name', name)}."
            f" If the schedule is not used any more: {patient.run('schedules', 'delete', name)}",
        )


CHECKS = (Check(overdue_schedule),)
