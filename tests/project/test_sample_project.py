"""A project outside of this repository tests its own code with the kit, on dblock as its wheel installs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.support.inner_pytest import Result, environment

pytestmark = [pytest.mark.second_stage]

ROOT = Path(__file__).parents[2]

INI = "[tool.pytest.ini_options]\nfilterwarnings = ['error']\nasyncio_default_fixture_loop_scope = 'function'\n"

BANK = """
import dblock
import fenced_store
import psycopg


def withdraw(dsn):
    with dblock.Client(dsn) as client, client.lock("account:1"), psycopg.connect(dsn) as connection:
        (balance,) = connection.execute("SELECT balance FROM accounts WHERE id = 1").fetchone()
        if balance >= 80:
            connection.execute("UPDATE accounts SET balance = %s WHERE id = 1", [balance - 80])


def withdraw_fenced(dsn):
    with dblock.Client(dsn) as client, client.lock("account:1") as lease, psycopg.connect(dsn) as connection:
        with fenced_store.fence(connection, "account:1", lease):
            (balance,) = connection.execute("SELECT balance FROM accounts WHERE id = 1").fetchone()
            if balance >= 80:
                connection.execute("UPDATE accounts SET balance = %s WHERE id = 1", [balance - 80])
"""

TESTS = """
import dblock
import psycopg
import pytest
from dblock.testing import prove_fenced

import bank


@pytest.fixture
def accounts(dblock_dsn):
    with psycopg.connect(dblock_dsn) as connection:
        connection.execute("CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint)")
        connection.execute("INSERT INTO accounts VALUES (1, 100)")
    yield dblock_dsn
    with psycopg.connect(dblock_dsn) as connection:
        connection.execute("DROP TABLE accounts")


def test_version_is_that_of_the_wheel():
    assert "unpacked" in dblock.__file__


def test_withdrawal(accounts):
    report = prove_fenced(bank.withdraw, dsn=accounts)
    assert report.safe, str(report)


def test_fenced_withdrawal(accounts):
    report = prove_fenced(bank.withdraw_fenced, dsn=accounts)
    assert report.safe, str(report)


def test_lock(dblock_client):
    with dblock_client.lock("a"):
        pass


def test_forgotten_lock(dblock_client):
    test_forgotten_lock.lease = dblock_client.lock("a").acquire()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Build the wheel, and run the project's tests with that."""
    folder = tmp_path_factory.mktemp("sample")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    zipfile.ZipFile(wheel).extractall(folder / "unpacked")
    project = folder / "project"
    project.mkdir()
    for name, content in (("pyproject.toml", INI), ("bank.py", BANK), ("test_bank.py", TESTS)):
        (project / name).write_text(content)
    path = os.pathsep.join([str(folder / "unpacked"), str(project)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--tb=short"],
        cwd=project,
        env=environment() | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=110,
    )
    return Result(done.returncode, done.stdout + done.stderr)


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(BANK.splitlines(), 1) if text in line)


def test_sample_project_runs_on_the_wheel(run: Result) -> None:
    assert run.outcome("test_version_is_that_of_the_wheel") == "PASSED", run.output
    assert run.outcome("test_lock") == "PASSED", run.output


def test_unsafe_function_of_the_sample_project_is_listed_with_its_line(run: Result) -> None:
    assert run.outcome("test_withdrawal") == "FAILED", run.output
    said = run.said_of("test_withdrawal")
    assert "withdraw is not fenced." in said
    line = line_of("UPDATE accounts")
    assert re.search(rf"statement \d+, at bank\.py:{line} in withdraw:\s+E? +UPDATE accounts", said), said


def test_fenced_function_of_the_sample_project_passes(run: Result) -> None:
    assert run.outcome("test_fenced_withdrawal") == "PASSED", run.output


def test_forgotten_lock_of_the_sample_project_fails_its_test(run: Result) -> None:
    assert run.outcome("test_forgotten_lock") == "ERROR", run.output
    assert re.search(r"lock 'a' .+ acquired at test_bank\.py:\d+ in", run.said_of("test_forgotten_lock"))
