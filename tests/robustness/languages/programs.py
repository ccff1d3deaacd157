"""Start programs in other languages, which use the clients of docs/languages."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from psycopg import conninfo

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / "docs" / "languages"
CONTENDERS = Path(__file__).parent

GO_PATH = Path("/usr/share/gocode")
JDBC = Path("/usr/share/java/postgresql.jar")


@functools.cache
def missing(language: str) -> str | None:
    """Return what this machine lacks to run programs in this language, or None."""
    if language == "node":
        if shutil.which("node") is None:
            return "needs Node.js"
        found = subprocess.run(["node", "-e", "require.resolve('pg')"], stderr=subprocess.DEVNULL, cwd=CLIENTS)
        return "needs the package pg of npm; NODE_PATH may name its folder" if found.returncode else None
    if language == "bash":
        if sys.platform != "linux":
            return "needs Linux, for its monotonic clock in /proc"
        lacking = [name for name in ("bash", "psql") if shutil.which(name) is None]
        return f"needs {' and '.join(lacking)}" if lacking else None
    if language == "go":
        have = shutil.which("go") and (GO_PATH / "src/github.com/lib/pq").exists()
        return None if have else "needs Go and its library lib/pq (Debian: golang-go, golang-github-lib-pq-dev)"
    if language == "java":
        have = shutil.which("javac") and JDBC.exists()
        return None if have else "needs a JDK and JDBC (Debian: default-jdk-headless, libpostgresql-jdbc-java)"
    return None


def skip_without(*languages: str) -> None:
    """Skip the test if one of these languages cannot be run here."""
    for language in languages:
        if lack := missing(language):
            pytest.skip(lack)


def command(language: str, name: str, folder: Path) -> list[str]:
    """Return the command that runs this program, compiled into the folder if need be."""
    if language == "node":
        return ["node", str(CONTENDERS / f"{name}.js")]
    if language == "bash":
        return ["bash", str(CONTENDERS / f"{name}.sh")]
    if language == "go":
        package = folder / "go" / "src" / "dblock"
        package.mkdir(parents=True)
        shutil.copy(CLIENTS / "dblock.go", package)
        go = {"GO111MODULE": "off", "GOPATH": f"{folder / 'go'}:{GO_PATH}", "GOCACHE": str(folder / "cache")}
        _compile(["go", "vet", str(package)], go)
        _compile(["go", "build", "-o", str(folder / name), str(CONTENDERS / f"{name}.go")], go)
        return [str(folder / name)]
    if language == "java":
        main = name.capitalize()
        sources = [str(CLIENTS / "Dblock.java"), str(CONTENDERS / f"{main}.java")]
        _compile(["javac", "-Xlint:all", "-Werror", "-d", str(folder / "java"), "-cp", str(JDBC), *sources], {})
        return ["java", "-XX:TieredStopAtLevel=1", "-cp", f"{folder / 'java'}:{JDBC}", main]
    return [sys.executable, "-m", f"tests.robustness.languages.{name}"]


def _compile(arguments: list[str], variables: dict[str, str]) -> None:
    done = subprocess.run(arguments, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def variables(dsn: str) -> dict[str, str]:
    """Return the environment of a program: how each language names this database, which is reached over TCP."""
    given: dict[str, Any] = conninfo.conninfo_to_dict(dsn)
    return {
        **os.environ,
        "DBLOCK_DSN": f"{dsn}?sslmode=disable",
        "JDBC_URL": "jdbc:postgresql://{host}:{port}/{dbname}".format(**given),
        "PGUSER": given["user"],
        "PGPASSWORD": given["password"],
        "MONOTONIC_OFFSET": str(clock_offset()),
    }


def clock_offset() -> int:
    """Return the microseconds from the wall clock, which is all that bash has, to the monotonic clock."""
    return min(((time.monotonic_ns() - time.time_ns()) // 1000 for _ in range(20)), key=abs)
