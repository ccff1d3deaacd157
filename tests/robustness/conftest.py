"""Provide servers that a test may restart, kill and replicate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dblock.embedded import Server
from tests.support.servers import private_server


@pytest.fixture
def embedded_binaries(request: pytest.FixtureRequest) -> None:
    """Skip the test if the suite runs on a server that it did not create."""
    if request.config.getoption("--postgres") != "embedded":
        pytest.skip("needs its own server from the embedded binaries")


@pytest.fixture
def own_server(request: pytest.FixtureRequest, embedded_binaries: None) -> Iterator[Server]:
    """Yield an embedded server with both schemas installed, for this test alone."""
    with private_server(getattr(request, "param", None), in_memory=True, installed=True) as server:
        yield server
