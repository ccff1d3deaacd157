"""A managed cluster of three nodes, which decides by itself who is the primary: the place for it.

It needs Patroni and a store for its own decisions, and comes with them. A strike will be what an operator, a crash or a
cut network does to one node; the traffic's way leads to all three, with target_session_attrs=read-write.
"""

from __future__ import annotations

import shutil

from tests.robustness.faults import Fault


class Cluster(Fault):
    """One node of a managed cluster of three fails, and the others choose a primary."""

    name = "cluster"

    @classmethod
    def missing(cls) -> str | None:
        if shutil.which("patroni") is None:
            return "Patroni is not installed"
        return "the stage for a cluster managed by Patroni is not built yet"
