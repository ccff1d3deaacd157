"""How soon a command is done that only looks."""

from __future__ import annotations

import time

import pytest

from tests.support.shell import Shell

pytestmark = pytest.mark.second_stage


def test_ls_is_quick(shell: Shell) -> None:
    """From start to end, against a running database; the quickest of some, for the machine does other things too."""

    def took() -> float:
        began = time.perf_counter()
        assert shell.run("ls").code == 0
        return time.perf_counter() - began

    times = [took() for _ in range(15)]
    assert min(times) <= 0.35, times
