"""The examples of docs/contributing/tests.md are tests, and pass: this module has them as its own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import dblock
from dblock.testing import MemoryClient
from tests.support.eventually import eventually
from tests.support.facade import Clients
from tests.support.sessions import Sessions
from tests.support.warm_start import Program

PAGE = Path(__file__).parents[2] / "docs" / "contributing" / "tests.md"
NAMES = (Clients, MemoryClient, Program, Sessions, dblock, eventually, pytest, sys)
"""What the examples use."""

EXAMPLES = [one for one in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "def test_" in one]

for _example in EXAMPLES:
    exec(compile(_example, str(PAGE), "exec", dont_inherit=True))


def test_page_has_an_example_of_each_kind() -> None:
    assert len(EXAMPLES) == 4
