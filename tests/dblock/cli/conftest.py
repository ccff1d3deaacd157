"""The fixture that gives each test of the command line its own shell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.shell import Shell


@pytest.fixture
def shell(dsn: str, tmp_path: Path) -> Iterator[Shell]:
    made = Shell(dsn, tmp_path)
    yield made
    made.close()
