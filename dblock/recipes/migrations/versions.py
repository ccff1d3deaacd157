"""The name of a version: what a migrator is asked for, as the ledger keeps it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

MAX_VERSION = 512
"""The bytes that the ledger has for a version."""


def version_of(revisions: Iterable[str]) -> str:
    """Return one name for a set of revisions. A long one is cut, and ends with a hash of the whole."""
    text = ",".join(sorted(revisions)) or "base"
    if len(text.encode()) > MAX_VERSION:
        return f"{text[:80]}…{hashlib.sha256(text.encode()).hexdigest()}"
    return text
