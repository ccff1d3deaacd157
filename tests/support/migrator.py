"""A migrator in a process of its own, for tests that kill or stop it: it runs one statement behind the gate.

    python -m tests.support.migrator DSN NAME VERSION TTL STATEMENT [in-transaction | hold-interpreter]

It prints `running` when its statement is about to be sent, and exits with 0 only if the run was recorded as a success.
With `in-transaction` the statement runs in a transaction that proves the lease, and that stays open until a line comes
over standard input. With `hold-interpreter` the process holds the interpreter for three ttls first.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys

import psycopg

from dblock.errors import DblockError
from dblock.recipes.migrations.gate import Gate
from dblock.recipes.migrations.turn import Plan
from tests.support.warm_start import Program

RUNNING = "running"


def start(dsn: str, name: str, version: str, ttl: float, statement: str, *how: str) -> subprocess.Popen[str]:
    """Start a migrator."""
    return Program(
        [sys.executable, "-m", "tests.support.migrator", dsn, name, version, str(ttl), statement, *how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until_running(migrator: subprocess.Popen[str]) -> None:
    """Return when the migrator has the turn."""
    assert migrator.stdout is not None
    line = migrator.stdout.readline().strip()
    assert line == RUNNING, (line, migrator.communicate()[1])


def main(dsn: str, name: str, version: str, ttl: str, statement: str, how: str = "") -> int:
    gate = Gate(dsn, Plan(name, version, migrator="test", ttl=float(ttl)))
    if not gate.enter():
        print("done", flush=True)
        return 0
    try:
        with psycopg.connect(dsn, autocommit=how != "in-transaction", application_name=gate.mark) as connection:
            if how == "hold-interpreter":
                ctypes.PyDLL(None).usleep(int(float(ttl) * 3_000_000))  # PyDLL keeps the interpreter's lock
            if how == "in-transaction":
                row = connection.execute(f"SELECT {gate.proof}".encode()).fetchone()
                assert row == (True,)
            print(RUNNING, flush=True)
            connection.execute(statement.encode())
            if how == "in-transaction":
                sys.stdin.readline()
    except psycopg.Error as error:
        gate.leave("failed", str(error))
        raise
    gate.leave("succeeded")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except (DblockError, psycopg.Error) as problem:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
        sys.exit(1)
