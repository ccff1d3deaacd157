"""Strike a cluster of three nodes that Patroni manages, and that elects its own leader.

A strike is what an operator, a crash or a pause does to the leader: a switchover, a kill of its Postgres and its
Patroni, a freeze of both or of Patroni alone for longer than its key in etcd lasts. On an asynchronous cluster there is
also a pair of sibling promotions: a standby is promoted, grants, and dies, and then the other standby is promoted,
which has never seen those grants. Each strike ends when the cluster is whole again.

The traffic's DSN names all three nodes and connects to the one that accepts writes.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.robustness.faults import Fault
from tests.robustness.faults.promotion import LOST
from tests.robustness.traffic import workloads
from tests.robustness.traffic.environment import prepare_database
from tests.support import patroni

if TYPE_CHECKING:
    from tests.robustness.traffic.environment import Environment

FROZEN = patroni.LEADER_KEY_TTL + 15.0
"""Seconds that a frozen leader stays frozen, so that another node leads and grants for a while before it resumes."""


PATRONI_KEEPS_ONE_HISTORY = (4,)
"""The first version that does not let a leader that was frozen take its expired key back."""


class SynchronousCluster(Fault):
    """Fail the leader of a cluster in synchronous mode: nothing acknowledged is lost."""

    name = "cluster-sync"
    effect = "processes"
    synchronous = True
    kinds: tuple[str, ...] = ("switchover", "kill")
    every = (2.0, 4.0)
    afterwards = 5.0

    def __init__(self) -> None:
        self._left: list[str] = []

    @classmethod
    def missing(cls) -> str | None:
        return patroni.missing()

    @contextmanager
    def set_up(self, env: Environment) -> Iterator[None]:
        with patroni.running_cluster(self.synchronous) as cluster:
            prepare_database(cluster.url, env.workload, env.bug)
            with workloads.named(env.workload).set_up(cluster.url, env.folder) as options:
                # A strike may lose grants, but not the tables that the traffic and the checkers use.
                cluster.wait_for_standbys()
                env.options.update(options)
                env.dsn = env.direct = cluster.url
                env.components["cluster"] = cluster
                try:
                    yield
                finally:
                    for log in cluster.logs():
                        shutil.copyfile(log, env.folder / f"cluster-{log.name}")

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        cluster: patroni.Cluster = env.components["cluster"]
        # Every kind comes up equally often, in random order.
        self._left = self._left or rng.sample(self.kinds, len(self.kinds))
        kind = self._left.pop()
        leader = cluster.leader()
        assert leader is not None
        actions: dict[str, Callable[[patroni.Cluster, patroni.Node], int]] = {
            "switchover": _switch_over,
            "kill": _kill,
            "freeze": _freeze,
            "freeze-patroni": _freeze_patroni,
            "siblings": _promote_siblings,
        }
        processes = actions[kind](cluster, leader)
        patroni.wait_for("the cluster to be whole again", cluster.is_whole)
        after = cluster.leader()
        return {"kind": kind, "processes": processes, "leader": [leader.name, after.name if after else None]}


class FrozenLeader(SynchronousCluster):
    """Freeze the leader of a cluster in synchronous mode, or its Patroni alone, until another node leads."""

    name = "cluster-freeze"
    kinds = ("freeze", "freeze-patroni")

    def __init__(self) -> None:
        super().__init__()
        if patroni.version() < PATRONI_KEEPS_ONE_HISTORY:
            self.loses_state = True
            self.exempt_checkers = dict.fromkeys(
                ("linearizability", "loss reported first", "durability"),
                "this Patroni lets a leader that was frozen take its expired key back, and so discards what another "
                "leader has acknowledged (docs/guides/failover.md)",
            )


class AsynchronousCluster(SynchronousCluster):
    """Fail the leader of a cluster in asynchronous mode: the last acknowledged grants may be lost."""

    name = "cluster-async"
    synchronous = False
    loses_state = True
    kinds = ("switchover", "kill", "freeze", "siblings")
    exempt_checkers = dict.fromkeys(("linearizability", "loss reported first", "durability"), LOST)


def _switch_over(cluster: patroni.Cluster, leader: patroni.Node) -> int:
    cluster.switch_over()
    return len(leader.pids())


def _kill(cluster: patroni.Cluster, leader: patroni.Node) -> int:
    killed = patroni.kill_node(leader)
    _wait_for_another(cluster, leader)
    cluster.start_node(leader)
    return killed


def _freeze(cluster: patroni.Cluster, leader: patroni.Node) -> int:
    """Stop Postgres and Patroni until another node has granted for a while, and then let both continue."""
    stopped = patroni.signal_node(leader, signal.SIGSTOP)
    try:
        time.sleep(FROZEN)
    finally:
        patroni.signal_node(leader, signal.SIGCONT)
    return stopped


def _freeze_patroni(cluster: patroni.Cluster, leader: patroni.Node) -> int:
    """Stop Patroni alone, so that for a while two nodes accept writes: the old leader and the new one."""
    assert leader.process is not None
    leader.process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(FROZEN)
    finally:
        leader.process.send_signal(signal.SIGCONT)
    return 1


def _promote_siblings(cluster: patroni.Cluster, leader: patroni.Node) -> int:
    """Promote one standby after the leader has died, and then the other one, which was frozen in between.

    Neither has the history of the other, so both give their new timeline the same number.
    """
    unseeing = next(node for node in cluster.nodes if node is not leader)
    patroni.signal_node(unseeing, signal.SIGSTOP)
    try:
        killed = patroni.kill_node(leader)
        sibling = next(node for node in cluster.nodes if node not in (leader, unseeing))
        patroni.wait_for("the first sibling to lead", sibling.accepts_writes)
        time.sleep(5.0)  # grants that the other sibling will never see
        killed += patroni.kill_node(sibling)
    finally:
        patroni.signal_node(unseeing, signal.SIGCONT)
    patroni.wait_for("the second sibling to lead", unseeing.accepts_writes)
    time.sleep(5.0)
    # Patroni takes the two timelines of one number for the same, so an operator must rebuild the first sibling.
    shutil.rmtree(sibling.data)
    for node in (leader, sibling):
        cluster.start_node(node)
    return killed


def _wait_for_another(cluster: patroni.Cluster, leader: patroni.Node) -> None:
    patroni.wait_for(
        "another node to lead", lambda: any(node.accepts_writes() for node in cluster.nodes if node is not leader)
    )
