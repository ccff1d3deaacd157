"""Disturb the network between the traffic and the server: slow, silent, cut, half open, or with lost replies.

Most faults exist in two forms. Through a port, clients detect the proxy between them and the server, and do without
presence. Through a socket in a folder, neither end can detect the proxy. Only this form tests presence across such
faults, because through a port the server would have to see the client's own address.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.robustness.faults import Fault
from tests.support.proxy import Proxy

if TYPE_CHECKING:
    from tests.robustness.traffic.environment import Environment

LONGEST_TTL = 2.0


class Network(Fault):
    """Put a proxy between the traffic and the server; the base class of these faults."""

    with_presence = False
    """Whether clients have presence despite the proxy."""

    @contextmanager
    def set_up(self, env: Environment) -> Iterator[None]:
        folder = Path(tempfile.mkdtemp(prefix="dblock-proxy-")) if self.with_presence else None
        try:
            with Proxy(env.direct, folder) as proxy:
                env.components["proxy"] = proxy
                env.dsn = proxy.dsn
                yield
        finally:
            if folder is not None:
                shutil.rmtree(folder)

    def strike(self, env: Environment, rng: random.Random) -> dict[str, object]:
        proxy: Proxy = env.components["proxy"]
        try:
            return self.disturb(proxy, rng)
        finally:
            proxy.delay = proxy.jitter = 0.0
            proxy.loses = lambda _: False
            proxy.flow()

    def disturb(self, proxy: Proxy, rng: random.Random) -> dict[str, object]:
        """Disturb the network once; the caller restores the proxy afterwards."""
        raise NotImplementedError


class Delay(Network):
    """Delay every reply by the same time, sometimes for longer than short leases last."""

    name = "delay"

    def disturb(self, proxy: Proxy, rng: random.Random) -> dict[str, object]:
        proxy.delay = rng.choice([0.02, 0.2, 0.7])
        time.sleep(rng.uniform(0.5, 1.5))
        return {"delay": proxy.delay}


class Jitter(Network):
    """Delay each reply by a different time, so that connections overtake each other."""

    name = "jitter"

    def disturb(self, proxy: Proxy, rng: random.Random) -> dict[str, object]:
        proxy.jitter = rng.choice([0.02, 0.1, 0.5])
        time.sleep(rng.uniform(0.5, 1.5))
        return {"jitter": proxy.jitter}


class Cut(Network):
    """Cut every connection at once."""

    name = "cut"
    effect = "connections"

    def disturb(self, proxy: Proxy, rng: random.Random) -> dict[str, object]:
        return {"connections": proxy.cut()}


class LoseReplies(Network):
    """Cut connections between a request that is performed and its reply, for a random share of the requests."""

    name = "lose-replies"
    effect = "lost"

    def disturb(self, proxy: Proxy, rng: random.Random) -> dict[str, object]:
        before, share = proxy.lost, rng.choice([0.05, 0.3, 0.7])
        proxy.loses = lambda _: rng.random() < share
        time.sleep(rng.uniform(0.1, 0.5))
        return {"share": share, "lost": proxy.lost - before}


class BlackHole(Network):
    """Pass nothing in either direction, for less or more than leases last; then everything late, or nothing ever."""

    name = "black-hole"

    def hold(self, proxy: Proxy) -> None:
        """Stop the flow."""
        proxy.fall_silent()

    def disturb(self, proxy: Proxy, rng: random.Random) -> dict[str, object]:
        seconds = rng.choice([0.2, 0.6, 1.3]) * LONGEST_TTL
        self.hold(proxy)
        time.sleep(seconds)
        late = rng.random() < 0.5
        return {"seconds": seconds, "late": late, "cut": 0 if late else proxy.cut()}


class HoldRequests(BlackHole):
    """Pass nothing to the server; then everything late, or nothing ever. Replies pass."""

    name = "hold-requests"

    def hold(self, proxy: Proxy) -> None:
        proxy.hold_requests()


class HoldReplies(BlackHole):
    """Pass nothing to the clients; then everything late, or nothing ever. Requests pass and are performed."""

    name = "hold-replies"

    def hold(self, proxy: Proxy) -> None:
        proxy.hold_replies()


class LoseClients(Network):
    """Close the clients' side of all connections, while the server keeps its side for a while."""

    name = "lose-clients"
    effect = "connections"

    def disturb(self, proxy: Proxy, rng: random.Random) -> dict[str, object]:
        lost = proxy.lose_clients()
        time.sleep(rng.uniform(0.1, 1.3) * LONGEST_TTL)
        proxy.cut()
        return {"connections": lost}


class LoseServers(Network):
    """Close the server's side of all sessions, while the clients keep theirs for a while."""

    name = "lose-servers"
    effect = "connections"

    def disturb(self, proxy: Proxy, rng: random.Random) -> dict[str, object]:
        lost = proxy.lose_servers()
        time.sleep(rng.uniform(0.1, 1.3) * LONGEST_TTL)
        proxy.cut()
        return {"connections": lost}


class PresentDelay(Delay):
    """Delay every reply, for clients with presence."""

    name = "present-delay"
    with_presence = True


class PresentCut(Cut):
    """Cut every connection at once, for clients with presence."""

    name = "present-cut"
    with_presence = True


class PresentLoseReplies(LoseReplies):
    """Cut connections before the replies to performed requests, for clients with presence."""

    name = "present-lose-replies"
    with_presence = True


class PresentBlackHole(BlackHole):
    """Pass nothing in either direction, for clients with presence."""

    name = "present-black-hole"
    with_presence = True


class PresentHoldRequests(HoldRequests):
    """Pass nothing to the server, for clients with presence."""

    name = "present-hold-requests"
    with_presence = True


class PresentHoldReplies(HoldReplies):
    """Pass nothing to the clients, for clients with presence."""

    name = "present-hold-replies"
    with_presence = True


class PresentLoseClients(LoseClients):
    """Close the clients' side of all connections, for clients with presence."""

    name = "present-lose-clients"
    with_presence = True


class PresentLoseServers(LoseServers):
    """Close the server's side of all sessions, for clients with presence: only here they may trust for too long."""

    name = "present-lose-servers"
    with_presence = True
    exempt_checkers = dict.fromkeys(
        ("linearizability", "loss reported first"),
        "the server ends the session and the client does not learn of it, so it may trust its lease for up to 45 s"
        " after the next grant of the lock (docs/concepts/waiting.md, When a holder dies)",
    )
