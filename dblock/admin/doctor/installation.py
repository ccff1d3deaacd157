"""Check that the installed schema is the one this version needs, unaltered, on a server that takes writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dblock._core.options import quoted
from dblock._core.schema_version import REVISION
from dblock.admin.doctor.bodies import Body, bodies
from dblock.admin.doctor.patient import USER, CannotCheck, Check, Finding, Patient


def standby(patient: Patient) -> Iterator[Finding]:
    """Check that the server is not a standby."""
    if patient.standby:
        yield Finding(
            "error",
            f"Database {patient.database!r} is on a standby, which takes no writes.",
            "Nothing can be granted, renewed or released here: every call raises NotWritable.",
            "Use the DSN of the primary: dblock doctor --dsn postgresql://… (a DSN with several hosts finds it).",
        )


def schema_missing(patient: Patient) -> Iterator[Finding]:
    """Check that dblock is installed."""
    if not patient.installed:
        yield Finding(
            "error",
            f"dblock is not installed in schema {patient.schema!r} of database {patient.database!r}.",
            "Nothing can be locked. Checks that need the schema did not run.",
            patient.run("install"),
        )


def schema_revision(patient: Patient) -> Iterator[Finding]:
    """Check that the schema has the revision that this version needs."""
    revision = _known_revision(patient)
    if revision < REVISION:
        yield Finding(
            "error",
            f"Schema {patient.schema!r} is at revision {revision}, but this version of dblock needs {REVISION}.",
            "Clients of this version refuse to use it (SchemaOutdated).",
            patient.run("install"),
        )
    elif revision > REVISION:
        yield Finding(
            "error",
            f"Schema {patient.schema!r} is at revision {revision}, newer than the {REVISION} that this version needs.",
            "Clients of this version refuse to use it (SchemaTooNew).",
            "pip install --upgrade dblock (in a checkout: git pull)",
        )


def schema_tables(patient: Patient) -> Iterator[Finding]:
    """Check that every table has its columns and keys."""
    _known_revision(patient)
    found = {
        (kind, name): (columns or {}, keys or [])
        for kind, name, columns, keys in patient.rows(
            "SELECT CASE c.relkind WHEN 'S' THEN 'sequence' ELSE 'table' END, c.relname::text,"
            " (SELECT jsonb_object_agg(a.attname, format_type(a.atttypid, a.atttypmod)) FROM pg_attribute AS a"
            "  WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),"
            " (SELECT jsonb_agg((SELECT jsonb_agg(a.attname ORDER BY k.place)"
            "   FROM unnest(i.indkey::smallint[]) WITH ORDINALITY AS k (number, place)"
            "   JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = k.number))"
            "  FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid AND i.indpred IS NULL)"
            " FROM pg_class AS c WHERE c.relnamespace = $1 AND c.relkind IN ('r', 'S')",
            patient.oid,
        )
    }
    wrong: list[str] = []
    if ("sequence", "token_sequence") not in found:
        wrong.append("sequence token_sequence is missing")
    for table, columns, keys in _expected(patient.schema):
        if ("table", table) not in found:
            wrong.append(f"table {table} is missing")
            continue
        there, unique = found["table", table]
        for column, kind in columns.items():
            if column not in there:
                wrong.append(f"column {table}.{column} is missing")
            elif there[column] != kind:
                wrong.append(f"column {table}.{column} is {there[column]}, not {kind}")
        wrong += [f"{table} has no unique index on ({', '.join(key)})" for key in keys if key not in unique]
    if wrong:
        drop = f"DROP SCHEMA {quoted(patient.schema)} CASCADE;"
        yield Finding(
            "error",
            f"Schema {patient.schema!r} claims revision {REVISION}, but does not match it: {'; '.join(wrong)}.",
            "Calls fail, or two clients may be granted the same lock. Other checks of the tables did not run.",
            "Restore the schema from a backup. Or, while no client uses it: "
            f"{drop} then: {patient.run('install')} && {patient.run('token raise --above')} N, with the highest "
            "token that any resource has seen (docs/guides/after-a-restore.md).",
        )


def schema_functions(patient: Patient) -> Iterator[Finding]:
    """Check that dblock's functions exist, each as in its file."""
    _known_revision(patient)
    path = patient.rows("SELECT format('search_path=%I, pg_temp', $1::text)", patient.schema)[0][0]
    found: dict[str, list[tuple[str, Body]]] = {}
    for name, identity, body, definer, settings in patient.rows(
        "SELECT p.proname::text,"
        " format('%I.%I(%s)', $1::text, p.proname, pg_get_function_identity_arguments(p.oid)),"
        " p.prosrc, p.prosecdef, coalesce(p.proconfig, '{}')"
        " FROM pg_proc AS p WHERE p.pronamespace = $2 ORDER BY p.oid",
        patient.schema,
        patient.oid,
    ):
        found.setdefault(name, []).append((identity, Body(body, definer, path in settings)))
    expected = bodies()
    missing = [name for name in expected if name not in found]
    changed = [name for name, body in expected.items() if name in found and body not in _of(found[name])]
    if missing or changed:
        wrong = [f"{name} is missing" for name in missing] + [f"{name} was changed" for name in changed]
        yield Finding(
            "error",
            f"Functions in schema {patient.schema!r} differ from this version's: {', '.join(wrong)}.",
            "dblock's guarantees hold only for its own functions. With others, tokens may go back, or two clients may "
            "hold the same lock.",
            patient.run("install --repair"),
        )
    twice = [
        identity
        for name, body in expected.items()
        for identity, other in found.get(name, [])
        if other != body and name not in changed
    ]
    if twice:
        yield Finding(
            "error",
            f"Schema {patient.schema!r} has other functions with the names of dblock's: {', '.join(twice)}.",
            "A call may reach the wrong function, or fail because it is ambiguous.",
            " ".join(f"DROP FUNCTION {identity};" for identity in twice),
        )


def _of(found: list[tuple[str, Body]]) -> list[Body]:
    return [body for _, body in found]


def _known_revision(patient: Patient) -> str:
    """Return the revision; raise if it is unknown, because the schema could then be of any version."""
    if patient.revision is None:
        raise CannotCheck(USER)
    return patient.revision


def _expected(schema: str) -> Iterator[tuple[str, dict[str, str], list[list[str]]]]:
    """Yield each table with its column types and its unique keys."""
    from sqlalchemy import UniqueConstraint
    from sqlalchemy.dialects.postgresql import dialect

    from dblock.admin.tables import metadata

    make_dialect: Any = dialect
    for table in metadata(schema).tables.values():
        said = {column.name: str(column.type.compile(make_dialect())) for column in table.columns}
        types = {name: kind.lower().partition(" collate")[0] for name, kind in said.items()}
        unique = [one for one in table.constraints if isinstance(one, UniqueConstraint)]
        keys = [[column.name for column in table.primary_key.columns]]
        yield table.name, types, keys + [[column.name for column in one.columns] for one in unique]


CHECKS = (
    Check(standby, needs_schema=False, stops="all"),
    Check(schema_missing, needs_schema=False, stops="schema"),
    Check(schema_revision, stops="schema"),
    Check(schema_tables, stops="schema"),
    Check(schema_functions),
)
