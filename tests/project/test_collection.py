"""How several processes share the work of the collection."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import collection

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", [1, 4])
def test_every_module_is_in_one_share_of_like_size(number: int) -> None:
    modules = [*(ROOT / "tests").rglob("test_*.py")]
    shares = collection.shares(modules, number)
    assert len(shares) == number
    assert sorted(path for share in shares for path in share) == sorted(modules)
    sizes = [sum(path.stat().st_size for path in share) for share in shares]
    assert max(sizes) - min(sizes) <= max(path.stat().st_size for path in modules)


def test_every_process_divides_the_modules_in_the_same_way() -> None:
    modules = [*(ROOT / "tests").rglob("test_*.py")]
    assert collection.shares(modules[::-1], 3) == collection.shares(modules, 3)


def test_module_has_the_name_by_which_a_share_imports_it() -> None:
    # Otherwise each module of the share would be imported twice.
    assert __name__ == "tests.project.test_collection"
