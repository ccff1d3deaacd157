"""The network between the traffic and the server: slow, silent, cut, half open, or losing answers.

Most come twice. Through a port, where clients see that something stands between them and the server, and do without
presence. And through a socket in a folder, where neither end can tell: the only way to test presence across such
faults, for through a port the server would have to see the client's own address.
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
    from tests.robustness.traffic.stage import Stage

LONGEST_TTL = 2.0


class Network(Fault):
    """The base of these: a proxy stands between the traffic and the server."""

    present = False
    """Whether clients are to have presence all the same."""

    @contextmanager
    def setting(self, stage: Stage) -> Iterator[None]:
        folder = Path(tempfile.mkdtemp(prefix="dblock-proxy-")) if self.present else None
        try:
            with Proxy(stage.direct, folder) as proxy:
                stage.props["proxy"] = proxy
                stage.dsn = proxy.dsn
                yield
        finally:
            if folder is not None:
                shutil.rmtree(folder)

    def strike(self, stage: Stage, dice: random.Random) -> dict[str, object]:
        proxy: Proxy = stage.props["proxy"]
        try:
            return self.trouble(proxy, dice)
        finally:
            proxy.delay = proxy.jitter = 0.0
            proxy.loses = lambda _: False
            proxy.flow()

    def trouble(self, proxy: Proxy, dice: random.Random) -> dict[str, object]:
        """Do it once; whatever it did to the flow is undone afterwards."""
        raise NotImplementedError


class Delay(Network):
    """Every answer is late by the same time; sometimes by more than short leases last."""

    name = "delay"

    def trouble(self, proxy: Proxy, dice: random.Random) -> dict[str, object]:
        proxy.delay = dice.choice([0.02, 0.2, 0.7])
        time.sleep(dice.uniform(0.5, 1.5))
        return {"delay": proxy.delay}


class Jitter(Network):
    """Answers are late, each differently, so that connections overtake each other."""

    name = "jitter"

    def trouble(self, proxy: Proxy, dice: random.Random) -> dict[str, object]:
        proxy.jitter = dice.choice([0.02, 0.1, 0.5])
        time.sleep(dice.uniform(0.5, 1.5))
        return {"jitter": proxy.jitter}


class Cut(Network):
    """Every connection is cut at once."""

    name = "cut"
    effect = "connections"

    def trouble(self, proxy: Proxy, dice: random.Random) -> dict[str, object]:
        return {"connections": proxy.cut()}


class LoseAnswers(Network):
    """Requests are carried out, and their connections cut before the answers; whichever requests chance chooses."""

    name = "lose-answers"
    effect = "lost"

    def trouble(self, proxy: Proxy, dice: random.Random) -> dict[str, object]:
        before, share = proxy.lost, dice.choice([0.05, 0.3, 0.7])
        proxy.loses = lambda _: dice.random() < share
        time.sleep(dice.uniform(0.1, 0.5))
        return {"share": share, "lost": proxy.lost - before}


class BlackHole(Network):
    """Nothing passes in either direction, for less or more than leases last; then all of it, late, or nothing ever."""

    name = "black-hole"

    def hold(self, proxy: Proxy) -> None:
        """Stop the flow."""
        proxy.fall_silent()

    def trouble(self, proxy: Proxy, dice: random.Random) -> dict[str, object]:
        seconds = dice.choice([0.2, 0.6, 1.3]) * LONGEST_TTL
        self.hold(proxy)
        time.sleep(seconds)
        late = dice.random() < 0.5
        return {"seconds": seconds, "late": late, "cut": 0 if late else proxy.cut()}


class HoldRequests(BlackHole):
    """Nothing reaches the server; then all of it, late, or nothing ever. Answers pass."""

    name = "hold-requests"

    def hold(self, proxy: Proxy) -> None:
        proxy.hold_requests()


class HoldAnswers(BlackHole):
    """Nothing reaches the clients; then all of it, late, or nothing ever. Requests pass, and are carried out."""

    name = "hold-answers"

    def hold(self, proxy: Proxy) -> None:
        proxy.hold_answers()


class LoseClients(Network):
    """Clients are told that their connections are gone; the server still has all of them, for a while."""

    name = "lose-clients"
    effect = "connections"

    def trouble(self, proxy: Proxy, dice: random.Random) -> dict[str, object]:
        lost = proxy.lose_clients()
        time.sleep(dice.uniform(0.1, 1.3) * LONGEST_TTL)
        proxy.cut()
        return {"connections": lost}


class LoseServers(Network):
    """The server has ended all sessions, and the clients are not told for a while."""

    name = "lose-servers"
    effect = "connections"

    def trouble(self, proxy: Proxy, dice: random.Random) -> dict[str, object]:
        lost = proxy.lose_servers()
        time.sleep(dice.uniform(0.1, 1.3) * LONGEST_TTL)
        proxy.cut()
        return {"connections": lost}


class PresentDelay(Delay):
    """The same, for clients with presence."""

    name = "present-delay"
    present = True


class PresentCut(Cut):
    """The same, for clients with presence."""

    name = "present-cut"
    present = True


class PresentLoseAnswers(LoseAnswers):
    """The same, for clients with presence."""

    name = "present-lose-answers"
    present = True


class PresentBlackHole(BlackHole):
    """The same, for clients with presence."""

    name = "present-black-hole"
    present = True


class PresentHoldRequests(HoldRequests):
    """The same, for clients with presence."""

    name = "present-hold-requests"
    present = True


class PresentHoldAnswers(HoldAnswers):
    """The same, for clients with presence."""

    name = "present-hold-answers"
    present = True


class PresentLoseClients(LoseClients):
    """The same, for clients with presence."""

    name = "present-lose-clients"
    present = True


class PresentLoseServers(LoseServers):
    """The same, for clients with presence: the one case in which they may believe for too long."""

    name = "present-lose-servers"
    present = True
    excuses = dict.fromkeys(
        ("linearizability", "loss told first"),
        "the server ends the session and the word of it does not reach the client, which may then believe in its"
        " lease for up to 45 s after another has the lock (docs/concepts/waiting.md, When a holder dies)",
    )
