"""Reserve a fault for a managed cluster of three nodes that elects its own primary.

The fault needs Patroni and a store for its decisions, and will be added with them. A strike will be what an operator, a
crash or a network partition does to one node. The traffic's DSN will name all three nodes, with
target_session_attrs=read-write.
"""

from __future__ import annotations

import shutil

from tests.robustness.faults import Fault


class Cluster(Fault):
    """Fail one node of a managed cluster of three, so that the others elect a primary."""

    name = "cluster"

    @classmethod
    def missing(cls) -> str | None:
        if shutil.which("patroni") is None:
            return "Patroni is not installed"
        return "the environment for a cluster managed by Patroni does not exist yet"
