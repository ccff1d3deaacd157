"""`dblock doctor`: what will hurt, and how to mend it.

Guarantee: what is said is true of this database at this moment, and a healthy one has nothing said of it. Each check
is a small function that looks at one thing and yields what it has found. One that may not look, or that would take
too long, says so and keeps none of the others from looking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dblock._core.options import quoted
from dblock._core.schema_version import DEFAULT_SCHEMA, check_name
from dblock._runtime.error_mapping import is_broken, translated
from dblock.admin.doctor import clocks, durability, installation, reach, rights, snapshots, tokens, upkeep
from dblock.admin.doctor.link import Link
from dblock.admin.doctor.patient import MONITOR, OWNER, USER, CannotCheck, Check, Finding, Limits, Patient

if TYPE_CHECKING:
    import psycopg

    from dblock._runtime.target import Target

__all__ = ["CHECKS", "CannotCheck", "Check", "Finding", "Limits", "Patient", "Report", "examine"]

CHECKS: tuple[Check, ...] = (
    *installation.CHECKS,
    *durability.CHECKS,
    *reach.CHECKS,
    *tokens.CHECKS,
    *upkeep.CHECKS,
    *snapshots.CHECKS,
    *rights.CHECKS,
    *clocks.CHECKS,
)
"""In the order in which they are made: what makes others pointless first, what takes time last."""

UNKNOWN = "What would have been found is not known; it need not be anything."

LEVELS = ("error", "warning", "note")


@dataclass(frozen=True)
class Report:
    """What an examination has found."""

    database: str
    findings: list[Finding]
    """The worst first."""
    checked: list[str]
    """The checks that were made."""

    @property
    def worst(self) -> str | None:
        """The level of the worst finding; None where there is none."""
        return self.findings[0].level if self.findings else None


def examine(
    target: Target,
    schema: str = DEFAULT_SCHEMA,
    *,
    fences: str = "fenced_store",
    limits: Limits | None = None,
    told: Callable[[str], None] = lambda check: None,
) -> Report:
    """Make every check that can be made; `told` hears of each before it is."""
    check_name(schema)
    with translated(schema), Link(target) as link:
        patient = Patient(link, schema, fences, limits or Limits())
        patient.meet()
        patient.end_look()
        examination = _Examination(patient)
        for check in CHECKS:
            if examination.wants(check):
                told(check.id)
                examination.make(check)
    return Report(str(target), examination.findings(), examination.checked)


class _Examination:
    """One round of checks."""

    def __init__(self, patient: Patient) -> None:
        self._patient = patient
        self._over = False
        self._found: list[Finding] = []
        self._refused: dict[str, list[str]] = {}
        self.checked: list[str] = []

    def wants(self, check: Check) -> bool:
        """Tell whether a check makes sense, after what was found so far."""
        return not self._over and (not check.needs_schema or self._patient.usable)

    def make(self, check: Check) -> None:
        """Make a check, as far as it can be made."""
        import psycopg

        found: list[Finding] = []
        try:
            found.extend(check.run(self._patient))
            self.checked.append(check.id)
        except CannotCheck as refusal:
            self._refused.setdefault(refusal.right, []).append(check.id)
        except psycopg.Error as error:
            if self._patient.link.connection.closed or is_broken(error):
                raise
            self._refuse(check, error)
        self._found += found
        if check.stops and any(finding.level == "error" for finding in found):
            self._patient.usable = False
            self._over = check.stops == "all"
        self._patient.end_look()

    def findings(self) -> list[Finding]:
        """Return all that was found, and at the end what could not be looked at."""
        notes = [self._not_checked(right, checks) for right, checks in self._refused.items()]
        return sorted([*self._found, *notes], key=lambda finding: LEVELS.index(finding.level))

    def _refuse(self, check: Check, error: psycopg.Error) -> None:
        from psycopg import errors as pg

        if isinstance(error, pg.InsufficientPrivilege):
            self._refused.setdefault(OWNER, []).append(check.id)
            return
        said = (error.diag.message_primary or type(error).__name__).rstrip(".")
        self._found.append(
            Finding(
                "note",
                f"The check {check.id} could not be made: {said}.",
                UNKNOWN,
                "dblock doctor, once more; SELECT pid, query FROM pg_stat_activity; shows what else is at work.",
                "cannot-check",
            )
        )

    def _not_checked(self, right: str, checks: list[str]) -> Finding:
        user = self._patient.user
        these = "this check looks" if len(checks) == 1 else "these checks look"
        takes = "It takes" if len(checks) == 1 else "They take"
        command = {
            OWNER: f"dblock doctor, with the DSN of role {self._patient.owner!r}, which owns the schema.",
            MONITOR: f"GRANT pg_monitor TO {quoted(user)};",
            USER: self._patient.run("grant", user),
        }
        return Finding(
            "note",
            f"Role {user!r} may not look at what {these} at: {', '.join(checks)}. {takes} {right}.",
            UNKNOWN,
            command.get(right, f"dblock doctor, with the DSN of a role that has {right}."),
            "cannot-check",
        )
