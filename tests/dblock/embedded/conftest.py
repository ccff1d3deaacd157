from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dblock.embedded import Server
from tests.support.servers import copy_fresh_data, memory, new_folder


@pytest.fixture(scope="session", autouse=True)
def _embedded_only(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--postgres") != "embedded":
        pytest.skip("these tests are about the embedded server")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for this test's own server, set as $DBLOCK_HOME. The server is stopped at the end."""
    named = new_folder(memory())
    monkeypatch.setenv("DBLOCK_HOME", str(named))
    yield named
    Server(named).stop()
    shutil.rmtree(named, ignore_errors=True)


@pytest.fixture
def fresh_data(folder: Path) -> None:
    """Put a fresh data folder into place, for a test that is not about creating one."""
    copy_fresh_data(Server(folder))


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the wheel's programs, as without $DBLOCK_POSTGRES."""
    monkeypatch.delenv("DBLOCK_POSTGRES", raising=False)
