"""Tokens of known value, for tests that name a token in a statement.

The fixture `known_tokens` raises the tokens of a test's database far ahead of the clock. From there they count up by
one: the first grant gets T1, the second T2.
"""

from __future__ import annotations

BASE = 4_000_000_000_000_000
T1, T2, T3, T4 = (BASE + number for number in range(1, 5))
