"""Start programs in other languages, which use the clients of docs/languages."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

from tests.support.frozen import frozen

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
    """Skip the test if one of these languages cannot be run here; fail if the gate has installed that language."""
    for language in languages:
        if lack := missing(language):
            installed = os.environ.get("DBLOCK_TEST_LANGUAGES", "").split()
            assert language not in installed, f"{language} was installed for this run, but the test {lack}"
            pytest.skip(lack)


@functools.cache
def _folder() -> Path:
    """Return a folder for what is compiled, which ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="dblock-languages-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _compiled_java() -> Path:
    folder = _folder() / "java"
    sources = [*map(str, [CLIENTS / "Dblock.java", *CONTENDERS.glob("*.java")])]
    _compile(["javac", "-Xlint:all", "-Werror", "-d", str(folder), "-cp", str(JDBC), *sources], {})
    return folder


@functools.cache
def _compiled_go(name: str) -> Path:
    folder = _folder() / "go"
    package = folder / "src" / "dblock"
    go = {"GO111MODULE": "off", "GOPATH": f"{folder}:{GO_PATH}", "GOCACHE": str(folder / "cache")}
    if not package.exists():
        package.mkdir(parents=True)
        shutil.copy(CLIENTS / "dblock.go", package)
        _compile(["go", "vet", str(package)], go)
    _compile(["go", "build", "-o", str(folder / name), str(CONTENDERS / f"{name}.go")], go)
    return folder / name


def command(language: str, name: str) -> list[str]:
    """Return the command that runs this program. What has to be compiled for it is compiled once."""
    if language == "node":
        return ["node", str(CONTENDERS / f"{name}.js")]
    if language == "bash":
        return ["bash", str(CONTENDERS / f"{name}.sh")]
    if language == "go":
        return [str(_compiled_go(name))]
    if language == "java":
        start = ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
        return [*start, "-cp", f"{_compiled_java()}:{JDBC}", name.capitalize()]
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


@contextmanager
def standing_still(operator: psycopg.Connection) -> Iterator[None]:
    """Stop all processes of the server: it accepts connections, and answers nothing."""
    ((data,),) = operator.execute("SHOW data_directory").fetchall()
    with frozen(Path(data)) as stopped:
        assert stopped > 1
        yield
