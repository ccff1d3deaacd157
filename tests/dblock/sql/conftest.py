"""Fixtures for the tests of the SQL functions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.still_clock import NOON, StillClock


@pytest.fixture
def clock(dsn: str) -> Iterator[StillClock]:
    """The clock of this test's database. It stands still until the test moves it."""
    clock = StillClock(dsn, NOON)
    yield clock
    clock.close()
