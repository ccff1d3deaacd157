"""docs/reference/python.md lists every public member of the main classes, with its real signature."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import dblock
from dblock import testing
from dblock._runtime.lost_events import AsyncLostEvent, LostEvent

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "python.md").read_text()


def parameters(function: Any, without: int = 1) -> list[str]:
    """Return the parameters as the page writes them. A default that is a mark of its own is written as …"""
    written = []
    for one in list(inspect.signature(function).parameters.values())[without:]:
        if one.kind is one.KEYWORD_ONLY and "*" not in written:
            written.append("*")
        default = "…" if type(one.default) is object else repr(one.default)
        written.append(one.name if one.default is one.empty else f"{one.name}={default}")
    return written


def members(kind: type) -> dict[str, Any]:
    return {name: member for name, member in inspect.getmembers(kind) if not name.startswith("_")}


def rows(heading: str, table: str) -> dict[str, str]:
    """Return the first two cells of each row of a table in a section."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    body = section.split(f"| {table} |", 1)[1].split("\n\n", 1)[0]
    return dict(re.findall(r"^\| `(.+?)` \| (.*) \|$", body, re.MULTILINE))


@pytest.mark.parametrize(
    ("heading", "kinds"),
    [
        ("Client and AsyncClient", (dblock.Client, dblock.AsyncClient)),
        ("Lock and AsyncLock", (dblock.Lock, dblock.AsyncLock)),
        ("Lease and AsyncLease", (dblock.Lease, dblock.AsyncLease)),
        ("SharedLock and AsyncSharedLock", (dblock.SharedLock, dblock.AsyncSharedLock)),
        ("Semaphore and AsyncSemaphore", (dblock.Semaphore, dblock.AsyncSemaphore)),
        ("LockSet and AsyncLockSet", (dblock.LockSet, dblock.AsyncLockSet)),
        ("Election and AsyncElection", (dblock.Election, dblock.AsyncElection)),
        ("Term and AsyncTerm", (dblock.Term, dblock.AsyncTerm)),
        ("Barrier and AsyncBarrier", (dblock.Barrier, dblock.AsyncBarrier)),
        ("Latch and AsyncLatch", (dblock.Latch, dblock.AsyncLatch)),
        ("The event `lost`", (LostEvent, AsyncLostEvent)),
    ],
)
def test_reference_lists_every_member_with_its_signature(heading: str, kinds: tuple[type, type]) -> None:
    listed = rows(heading, "member")
    real = {
        f"{name}({', '.join(parameters(member))})" if callable(member) else name
        for name, member in members(kinds[0]).items()
    }
    assert set(listed) == real
    awaited = {row.split("(")[0] for row, text in listed.items() if "**await**" in text}
    assert awaited == {name for name, member in members(kinds[1]).items() if inspect.iscoroutinefunction(member)}


def test_reference_lists_every_argument_of_a_client() -> None:
    for kind in (dblock.Client, dblock.AsyncClient):
        assert list(rows("Client and AsyncClient", "argument")) == [
            one for one in parameters(kind.__init__) if one != "*"
        ]


def test_reference_lists_the_test_kit_with_its_signatures() -> None:
    real = set()
    for name in testing.__all__:
        member = getattr(testing, name)
        real.add(f"{name}({', '.join(parameters(member, 0))})" if inspect.isfunction(member) else name)
    assert set(rows("Test kit", "name")) == real
