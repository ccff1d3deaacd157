"""The gate is one command: the linter, the formatter and the type checker run as tests."""

from __future__ import annotations

import pytest

from tests.support.quality import TOOLS, Checks


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool", TOOLS, ids=" ".join)
def test_the_whole_tree_is_clean(tool: list[str], request: pytest.FixtureRequest) -> None:
    code, said = request.config.stash[Checks.key].result(tool)
    assert code == 0, said
