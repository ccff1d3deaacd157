"""What `make robustness` plays: every workload without a fault and with those that concern it, and the long counts.

Each entry is one run with a seed of its own. The counts that docs/robustness.md promises (freezes, kills of the whole
Postgres, promotions, operations) are the sums over entries here.
"""

from __future__ import annotations

from tests.robustness.scenarios import Scenario

Entry = tuple[Scenario, int]
"""A scenario and its seed."""

SETS = ("set_key", "set_transaction", "set_row", "set_table", "set_s3", "set_files", "set_http")
EVERYWHERE = ("mutex", "bank", "line", "force", "set_key", "set_transaction")


def full() -> list[Entry]:
    """Return all runs of the matrix."""
    return []
