"""Call functions with extreme arguments that a seed generates.

The functions come from the catalogue: every function that a role may call, so that a new function is called as well.
Each type of argument has a pool of extreme values. A type without a pool is an error: give it one. The results of
the functions (tokens, tickets, ids) join the pool of their type, so that later calls use the results of earlier ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg

HELD = "held"
"""The name of the bystander's lock and of its fenced key."""

TEXTS = [
    None, "", "a", "b", "c", HELD, "public.mine", "public.mine:1", " ", "%", "_", "\\", "'", '"', "$$", "%s",
    "NULL", "{}", "x" * 512, "x" * 513, "ü" * 256, "x" * 1024, "x" * 1025, "x" * 100_000, "\u202e",
    "\x01\x1b[2J\x7f\x9b", "\U0001f600" * 3, "'; DROP TABLE distributed_locks; --", "row", "table", "ACCESS SHARE",
    "read-write", "semaphore", "read", "write", "a#writer", "b#0",
    "ACCESS SHARE MODE; SELECT 1; LOCK TABLE x",
]  # fmt: skip
WHOLE = [None, 0, 1, 2, 3, -1, 63, 64, 2**31 - 1, -(2**31)]
LONG = [*WHOLE, 2**31, 2**32, 2**53, 2**63 - 2, 2**63 - 1, -(2**63)]
INTERVALS = [
    None, "0", "1 microsecond", "99.999 ms", "100 ms", "1 s", "30 s", "24 hours", "24:00:00.000001", "-1 s", "1 day",
    "1 month -30 days +1 hour", "1 year -360 days +1 hour", "-1 year +360 days +1 hour",
    "100000 years -36000000 days +1 hour", "-100000 years +36000000 days +1 hour", "178000000 years",
    "-178000000 years",
]  # fmt: skip
UUIDS = [None, str(UUID(int=0)), str(UUID(int=2**128 - 1)), *(str(UUID(int=number)) for number in range(1, 5))]
DEEP = 200

POOLS: dict[str, list[Any]] = {
    "text": TEXTS,
    "bigint": LONG,
    "integer": WHOLE,
    "boolean": [None, True, False],
    "uuid": UUIDS,
    "interval": INTERVALS,
    "double precision": [None, 0, -1, 0.001, 1e-300, 1, 2e9, 1e300, "NaN", "Infinity", "-Infinity"],
    "timestamp with time zone": [None, "infinity", "-infinity", "4713-01-01 BC", "294276-12-31", "2026-01-01"],
    "jsonb": [
        None, "null", "{}", "[]", '""', "0", "1" * 400, '{"a": "\\u0001"}', "[" * DEEP + "]" * DEEP,
        '{"a":' * DEEP + "1" + "}" * DEEP, '"' + "x" * 8190 + '"', '"' + "x" * 8191 + '"',
    ],
    "bytea": [None, "\\x", "\\x00ff", "\\x" + "00" * 50_000],
    "oid": [None, 0, 20, 25, 2**32 - 1],
}  # fmt: skip

USUAL: dict[str, list[Any]] = {
    "text": [HELD, HELD, "a", "b"],
    "interval": ["1 s", "30 s"],
    "boolean": [True, False],
    "bigint": [1, 2, 3, 1000],
    "double precision": [0.01],
}
"""Plausible values. The bystander's name comes up as often as all other names together."""

INTENDED = {
    "22023": "a value outside the documented limits; the message names the lock or resource and the limit",
    "42501": "the role lacks the privilege",
    "55P03": "another session held a row for longer than the call may wait",
    "40001": "the snapshot is too old for this call: retry",
    "0A000": "not supported at this isolation level",
    "DBL10": "a name that has another kind",
    "DBL11": "a semaphore with another number of permits",
    "DBL12": "a barrier or a latch of another size",
    "FEN01": "a stale token",
    "FEN02": "a required token is missing",
    "FEN03": "an invalid token",
    "FEN04": "a claim below the fence",
    "42703": "a column that does not exist",
    "42701": "a column of the user has the name of a fence column",
    "42704": "a table that is not protected or does not exist",
    "42710": "the name of another fence",
    "42809": "a relation that cannot be protected",
    "55006": "a table that still has its fence",
    "2201W": "from Postgres: a negative LIMIT in a list function",
    "22025": "from Postgres: a pattern that ends in the middle of an escape",
}
"""The errors that a caller may get, whatever it sends. Any other error is a bug."""

FOUND = (
    "SELECT p.proname, p.provariadic <> 0, p.proargnames, p.pronargdefaults::int,"
    " ARRAY(SELECT format_type(t, NULL) FROM unnest(p.proargtypes::oid[]) WITH ORDINALITY AS a (t, n) ORDER BY n)"
    " FROM pg_proc AS p WHERE p.pronamespace = %s::regnamespace"
    " AND has_function_privilege(current_user, p.oid, 'EXECUTE')"
    " AND p.prorettype <> 'trigger'::regtype ORDER BY p.oid::regprocedure::text"
)


@dataclass
class Function:
    """A function, and the types of its arguments."""

    schema: str
    name: str
    variadic: bool
    defaults: int
    types: list[str]


@dataclass
class Call:
    """One call: a statement and its values."""

    statement: str
    values: list[Any]

    def __str__(self) -> str:
        return f"{self.statement} with {[one if len(repr(one)) < 80 else repr(one)[:77] + '…' for one in self.values]}"


@dataclass
class Surprise:
    """An error that is not among the intended ones."""

    call: Call
    sqlstate: str | None
    message: str

    def __str__(self) -> str:
        return f"{self.sqlstate} {self.message}\n    {self.call}"


@dataclass
class Fuzzer:
    """Calls the functions that one session may call, in the order and with the arguments that a seed gives."""

    session: psycopg.Connection
    seed: str
    tables: list[int]
    """The OIDs of tables to use as arguments."""
    untouchable: frozenset[Any] = frozenset()
    """Results that are never used as arguments: the bystander's token and ids, which may release its lock."""
    calls: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    surprises: list[Surprise] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._seen: dict[str, list[Any]] = {"bigint": [], "uuid": []}
        self.functions = [
            Function(schema, name, variadic, defaults, types)
            for schema in ("dblock", "fenced_store")
            for name, variadic, _, defaults, types in self.session.execute(FOUND, [schema]).fetchall()
        ]
        assert self.functions

    def step(self) -> None:
        """Make one call, and record its outcome."""
        call = self._random_call()
        self.calls += 1
        isolation = self._random.choice(["READ COMMITTED"] * 4 + ["REPEATABLE READ", "SERIALIZABLE"])
        token = self._random.choice(["", "1", "7", "junk", "99999999999999999999", "-1", "9223372036854775807"])
        try:
            with self.session.transaction():
                self.session.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}".encode())
                self.session.execute("SELECT set_config('fenced_store.token', %s, true)", [token])
                rows = self.session.execute(call.statement.encode(), call.values).fetchall()
        except psycopg.Error as error:
            self.outcomes[str(error.sqlstate)] = self.outcomes.get(str(error.sqlstate), 0) + 1
            if error.sqlstate not in INTENDED:
                message = f"{error.diag.message_primary or error} {error.diag.context or ''}"
                self.surprises.append(Surprise(call, error.sqlstate, message[:300]))
        else:
            self.outcomes["done"] = self.outcomes.get("done", 0) + 1
            self._remember(rows)

    def _random_call(self) -> Call:
        function = self._random.choice(self.functions)
        taken = len(function.types) - self._random.randint(0, function.defaults)
        values = [self._value(kind) for kind in function.types[:taken]]
        placeholders = [f"%s::{kind}" for kind in function.types[:taken]]
        if function.variadic and placeholders:
            placeholders[-1] = f"VARIADIC {placeholders[-1]}"
        return Call(f"SELECT * FROM {function.schema}.{function.name}({', '.join(placeholders)})", values)

    def _value(self, kind: str) -> Any:
        if kind.endswith("[]"):
            return self._array(kind.removesuffix("[]"))
        if kind == "regclass":
            return self._random.choice([None, 0, 2**32 - 1, *self.tables])
        if kind in USUAL and self._random.random() < 0.4:
            return self._random.choice(USUAL[kind])  # otherwise most calls would be refused
        if self._seen.get(kind) and self._random.random() < 0.5:
            return self._random.choice(self._seen[kind][-20:])
        assert kind in POOLS, f"give the type {kind} a pool of extreme values"
        return self._random.choice(POOLS[kind])

    def _array(self, kind: str) -> Any:
        shape = self._random.randrange(6)
        if shape == 0:
            return self._random.choice([None, "{}"])
        values = [self._value(kind) for _ in range(self._random.choice([1, 1, 2, 2, 3, 4]))]
        if shape == 1:
            return [values, [self._value(kind) for _ in values]]
        if shape == 2:
            return f"[5:{4 + len(values)}]=" + "{" + ",".join(map(_as_array_element, values)) + "}"
        return "{" + ",".join(map(_as_array_element, values)) + "}"

    def _remember(self, rows: list[tuple[Any, ...]]) -> None:
        for row in rows:
            for one in row:
                for value in one if isinstance(one, list) else [one]:
                    if isinstance(value, (dict, list, bool)) or value in self.untouchable:
                        continue
                    if isinstance(value, int) and -(2**63) <= value < 2**63:
                        self._seen["bigint"].append(value)
                    elif isinstance(value, UUID):
                        self._seen["uuid"].append(str(value))


def _as_array_element(value: Any) -> str:
    """Return a value as the text of an array element."""
    if value is None:
        return "NULL"
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
