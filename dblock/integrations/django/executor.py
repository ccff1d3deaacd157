"""Django's migration executor behind the gate.

Django asks it for the plan once the command line is understood. If there is something to do, the executor enters the
gate and plans again: another replica may have done the work in between.

Django records a migration outside the transaction of its DDL whenever SQL was deferred, for example for a foreign key.
Behind the gate both commit together. The record of a migration that is not atomic has a transaction of its own, which
proves the lease.
"""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.recorder import MigrationRecorder

from dblock.integrations.django.gate import MigrationGate, active_gate


class GatedExecutor(MigrationExecutor):
    """Django's executor, which enters the gate of the running `migrate` before it applies anything."""

    def __init__(self, connection: Any, progress_callback: Any = None) -> None:
        super().__init__(connection, progress_callback)
        self.recorder = GatedRecorder(connection)

    def migration_plan(self, targets: Any, clean_start: bool = False) -> Any:
        """Return the plan. If there is something to do, wait for the turn first and plan again."""
        plan = super().migration_plan(targets, clean_start)
        gate = active_gate(self.connection)
        if gate is None or clean_start or not (plan or self._has_unrecorded()):
            return plan

        def look() -> tuple[bool, str | None]:
            nonlocal plan
            self.loader.build_graph()
            plan = MigrationExecutor.migration_plan(self, targets)
            return not (plan or self._has_unrecorded()), self._newest()

        gate.enter([f"{app}.{name or 'zero'}" for app, name in targets], look)
        return plan

    def apply_migration(self, state: Any, migration: Any, fake: bool = False, fake_initial: bool = False) -> Any:
        """Apply a migration and record it in one transaction, and retry it if it could not lock a table."""
        gate = self._open_gate()
        apply = super().apply_migration
        if gate is None:
            return apply(state, migration, fake, fake_initial)
        if migration.atomic:
            after = gate.run_in_transaction(lambda: apply(state.clone(), migration, fake, fake_initial))
        else:
            with gate.outside_transactions():
                gate.drop_invalid([] if fake else _indexes(migration, "AddIndexConcurrently"))
                after = apply(state, migration, fake, fake_initial)
        gate.note(f"{migration.app_label}.{migration.name}")
        return after

    def unapply_migration(self, state: Any, migration: Any, fake: bool = False) -> Any:
        """Unapply a migration and remove its record in one transaction, and retry it if it could not lock a table."""
        gate = self._open_gate()
        unapply = super().unapply_migration
        if gate is None:
            return unapply(state, migration, fake)
        if migration.atomic:
            after = gate.run_in_transaction(lambda: unapply(state.clone(), migration, fake))
        else:
            with gate.outside_transactions():
                gate.drop_invalid([] if fake else _indexes(migration, "RemoveIndexConcurrently"))
                after = unapply(state, migration, fake)
        gate.note(f"before {migration.app_label}.{migration.name}")
        return after

    def _open_gate(self) -> MigrationGate | None:
        gate = active_gate(self.connection)
        return gate if gate is not None and gate.is_open else None

    def _has_unrecorded(self) -> bool:
        """Return whether Django would record a squashed migration whose parts are all applied."""
        if not self.loader.replacements:
            return False
        applied = self.recorder.applied_migrations()
        return any(
            key not in applied and all(part in applied for part in migration.replaces)
            for key, migration in self.loader.replacements.items()
        )

    def _newest(self) -> str | None:
        """Return the migration that was recorded last."""
        rows = [(getattr(row, "id", None) or 0, key) for key, row in self.loader.applied_migrations.items()]
        return ".".join(max(rows)[1]) if rows else None


class GatedRecorder(MigrationRecorder):
    """Django's recorder, which changes each record in a transaction: that transaction proves the lease."""

    def record_applied(self, app: str, name: str) -> None:
        """Record that a migration was applied."""
        with transaction.atomic(using=self.connection.alias):
            super().record_applied(app, name)

    def record_unapplied(self, app: str, name: str) -> None:
        """Remove the record of a migration."""
        with transaction.atomic(using=self.connection.alias):
            super().record_unapplied(app, name)


def _indexes(migration: Any, kind: str) -> list[str]:
    """Return the names of the indexes that operations of this kind build."""
    found = [operation for operation in migration.operations if type(operation).__name__ == kind]
    return [str(one.index.name if hasattr(one, "index") else one.name) for one in found]
