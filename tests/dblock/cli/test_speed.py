"""The duration of a short command."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.support.shell import Shell

pytestmark = pytest.mark.second_stage

CONNECTS = "import sys, psycopg; psycopg.connect(sys.argv[1]).execute('SELECT 1').fetchone()"
"""The least that a command does which asks a database."""


@pytest.mark.alone
def test_ls_starts_quickly(shell: Shell, dsn: str) -> None:
    """From start to end, against a running database. Of each program the fastest run counts, as on an idle machine."""

    def list_locks() -> None:
        assert shell.run_process("ls", cold=True).code == 0

    def connect() -> None:
        subprocess.run([sys.executable, "-c", CONNECTS, dsn], check=True)

    def took(program: Callable[[], None]) -> float:
        began = time.perf_counter()
        program()
        return time.perf_counter() - began

    times = [(took(list_locks), took(connect)) for _ in range(15)]
    ours, least = map(min, zip(*times, strict=True))
    assert ours <= 1.25 * least, (ours, least)
