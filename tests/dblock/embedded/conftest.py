from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dblock.embedded import Server
from tests.support.servers import new_folder


@pytest.fixture(scope="session", autouse=True)
def _embedded_only(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--postgres") != "embedded":
        pytest.skip("about the embedded server alone")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for a server of this test's own, which $DBLOCK_HOME names; whatever runs there is stopped."""
    named = new_folder()
    monkeypatch.setenv("DBLOCK_HOME", str(named))
    yield named
    Server(named).stop()
    shutil.rmtree(named, ignore_errors=True)


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the wheel's programs, as a user does who has named no others."""
    monkeypatch.delenv("DBLOCK_POSTGRES", raising=False)
