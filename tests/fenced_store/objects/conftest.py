"""Helpers for the tests of objects."""

from __future__ import annotations

from typing import Any


def names_in(store: Any) -> list[str]:
    return sorted(one["path"] for chunk in store.list() for one in chunk)
