"""The doctor: examine a database, find what will cause trouble, and say how to fix it.

Guarantee: every finding is true of this database at this moment, and a healthy database has no findings. Each check is
a small function that examines one thing and yields its findings. A check that lacks a privilege, or that would take too
long, is reported as such and does not keep the others from running.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from dblock._core.options import quoted
from dblock._core.schema_version import DEFAULT_SCHEMA, check_name
from dblock._runtime.error_mapping import is_broken, translated
from dblock.admin.doctor import (
    clocks,
    connectivity,
    durability,
    engine,
    guard,
    installation,
    maintenance,
    privileges,
    schedules,
    snapshots,
    tokens,
)
from dblock.admin.doctor.patient import MONITOR, OWNER, USER, CannotCheck, Check, Finding, Limits, Patient
from dblock.admin.link import Link
from dblock.errors import InvalidArgument

if TYPE_CHECKING:
    import psycopg

    from dblock._runtime.target import Target

__all__ = ["CHECKS", "CannotCheck", "Check", "Finding", "Limits", "Patient", "Report", "examine"]

CHECKS: tuple[Check, ...] = (
    *installation.CHECKS,
    *durability.CHECKS,
    *connectivity.CHECKS,
    *engine.CHECKS,
    *tokens.CHECKS,
    *maintenance.CHECKS,
    *snapshots.CHECKS,
    *privileges.CHECKS,
    *guard.CHECKS,
    *schedules.CHECKS,
    *clocks.CHECKS,
)
"""In the order in which they run: checks that make others pointless come first, slow ones last."""

UNKNOWN = "The result of this check is unknown; there may be nothing wrong."

LEVELS = ("error", "warning", "note")


@dataclass(frozen=True)
class Report:
    """The result of an examination."""

    database: str
    findings: list[Finding]
    """The findings, the worst first, and the accepted ones last."""
    checked: list[str]
    """The IDs of the checks that ran."""

    @property
    def worst(self) -> str | None:
        """The level of the worst finding that was not accepted; None if there is no such finding."""
        return next((finding.level for finding in self.findings if not finding.accepted), None)


def examine(
    target: Target,
    schema: str = DEFAULT_SCHEMA,
    *,
    fences: str = "fenced_store",
    limits: Limits | None = None,
    accept: Collection[str] = (),
    on_check: Callable[[str], None] = lambda check: None,
) -> Report:
    """Run every check that can run; `on_check` receives the ID of each check before it runs.

    Findings of the checks in `accept` are reported, but do not count as trouble.
    """
    check_name(schema)
    _check_ids(accept)
    with translated(schema), Link(target) as link:
        patient = Patient(link, schema, fences, limits or Limits())
        patient.read_basics()
        patient.end_transaction()
        examination = _Examination(patient)
        for check in CHECKS:
            if examination.applies(check):
                on_check(check.id)
                examination.run(check)
    found = [replace(finding, accepted=finding.id in accept) for finding in examination.findings()]
    return Report(str(target), sorted(found, key=lambda finding: finding.accepted), examination.checked)


def _check_ids(accepted: Collection[str]) -> None:
    known = [check.id for check in CHECKS]
    for one in accepted:
        if one not in known:
            near = get_close_matches(one, known, 1)
            hint = f"Did you mean {near[0]!r}?" if near else "docs/reference/doctor.md lists them."
            raise InvalidArgument(f"The doctor has no check {one!r} to accept. {hint}")


class _Examination:
    """One round of checks."""

    def __init__(self, patient: Patient) -> None:
        self._patient = patient
        self._over = False
        self._found: list[Finding] = []
        self._denied: dict[str, list[str]] = {}
        self.checked: list[str] = []

    def applies(self, check: Check) -> bool:
        """Return whether a check makes sense after the findings so far."""
        return not self._over and (not check.needs_schema or self._patient.usable)

    def run(self, check: Check) -> None:
        """Run a check, and record its findings or why it could not run."""
        import psycopg

        found: list[Finding] = []
        try:
            found.extend(check.run(self._patient))
            self.checked.append(check.id)
        except CannotCheck as refusal:
            self._denied.setdefault(refusal.privilege, []).append(check.id)
        except psycopg.Error as error:
            if self._patient.link.connection.closed or is_broken(error):
                raise
            self._record_failure(check, error)
        self._found += found
        if check.stops and any(finding.level == "error" for finding in found):
            self._patient.usable = False
            self._over = check.stops == "all"
        self._patient.end_transaction()

    def findings(self) -> list[Finding]:
        """Return all findings, and notes on the checks that could not run."""
        notes = [self._not_checked(privilege, checks) for privilege, checks in self._denied.items()]
        return sorted([*self._found, *notes], key=lambda finding: LEVELS.index(finding.level))

    def _record_failure(self, check: Check, error: psycopg.Error) -> None:
        from psycopg import errors as pg

        if isinstance(error, pg.InsufficientPrivilege):
            self._denied.setdefault(OWNER, []).append(check.id)
            return
        reason = (error.diag.message_primary or type(error).__name__).rstrip(".")
        self._found.append(
            Finding(
                "note",
                f"The check {check.id} could not run: {reason}.",
                UNKNOWN,
                "Run dblock doctor again. SELECT pid, query FROM pg_stat_activity; shows what else is running.",
                "cannot-check",
            )
        )

    def _not_checked(self, privilege: str, checks: list[str]) -> Finding:
        user = self._patient.user
        these = "this check" if len(checks) == 1 else "these checks"
        command = {
            OWNER: f"Run dblock doctor with the DSN of role {self._patient.owner!r}, which owns the schema.",
            MONITOR: f"GRANT pg_monitor TO {quoted(user)};",
            USER: self._patient.run("grant", user),
        }
        return Finding(
            "note",
            f"Role {user!r} lacks the privilege for {these}: {', '.join(checks)}. Needed: {privilege}.",
            UNKNOWN,
            command.get(privilege, f"Run dblock doctor with the DSN of a role that has {privilege}."),
            "cannot-check",
        )
