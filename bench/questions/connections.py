"""How many connections, and how much memory, does a process cost that is idle, holds a lock or waits for one?

Each state is entered by a new process with one client, and measured once it has been quiet for a while. The memory is
what the client's process has for itself beyond the same process before its first lock, and what all processes of the
server have for themselves beyond the time before it. Pages that processes share do not count.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from bench.harness import usage
from bench.harness.arena import SESSION
from bench.harness.contender import Contender
from bench.harness.question import Question, Run
from bench.harness.rounds import Block, Sample
from bench.harness.table import Column, Goal, Table
from bench.harness.workers import Team

STATES = ("idle", "holding", "waiting", "100 held", "100 waiting")
WEIGHED = ("holding", "100 waiting")
"""States whose memory is measured, so each of them has the server to itself."""

PEERS = ("redis-py", "redis-py, asyncio", "python-redis-lock", "kazoo", "etcd v3lock", *SESSION)
"""Whether Redis waits for its disk makes no difference here."""

CONNECTIONS = tuple(
    Column(f"{state} connections", f"{state}: connections", drawn=state != "idle", checked=0.01) for state in STATES
)
MEMORY = tuple(
    Column(f"{state} {side}", f"{state}: {side} MB", digits=1) for state in WEIGHED for side in ("client", "server")
)

NO_PRESENCE = "dblock, presence=None"
"""A client whose leases end only at their deadlines, so it needs no second connection while it holds them."""

QUIET = 11.0
"""Seconds. A client of dblock closes a connection for calls 5 to 10 s after the last call."""

GOALS = (
    Goal("dblock", "holding connections", "", 1),
    Goal(NO_PRESENCE, "holding connections", "", 1),
    Goal("dblock", "waiting connections", "", 1),
)


def measure(run: Run) -> list[Table]:
    contenders = run.arena.contenders("dblock")
    contenders += [replace(one, name=NO_PRESENCE, options={"presence": None}) for one in contenders]
    contenders += run.arena.contenders("dblock, asyncio", *PEERS)
    states = run.pick(STATES, STATES[:3])
    blocks: dict[str, Block] = {
        one.name: partial(_states, one, states, run.pick(QUIET, 0.2), run.pick(1.0, 0.2)) for one in contenders
    }
    measured = run.interleave(blocks, 1)
    title, reference = "one process with one client", "pg_advisory_lock"
    return [
        Table("connections", title, reference, CONNECTIONS).fill(measured, GOALS),
        Table("memory", title, reference, MEMORY).fill(measured),
    ]


def _states(contender: Contender, states: tuple[str, ...], quiet: float, settling: float) -> Sample:
    enter = partial(_state, contender, quiet=quiet, settling=settling)
    found: Sample = {}
    for state in states:
        if state in WEIGHED:
            time.sleep(settling)  # the sessions of the state before end
            found |= enter(state)
    with ThreadPoolExecutor() as threads:
        for sample in threads.map(enter, [state for state in states if state not in WEIGHED]):
            found |= sample
    return found


def _state(contender: Contender, state: str, quiet: float, settling: float) -> Sample:
    """Let a new process enter this state, and measure it."""
    many = 100 if state.startswith("100") else 1
    kind = ("task" if contender.is_async else "thread") if many > 1 else "process"
    name = f"state {state} {contender.name}"
    with Team(contender, 1) as other, Team(contender, many, kind) as team:
        if "waiting" in state:
            other.run("hold", name=name)
        before, served = usage.memory(team.pids), usage.memory(usage.tree(*contender.servers))
        if state == "idle":
            team.run("pairs", seconds=0.1)
        elif "waiting" in state:
            team.run("begin_to_wait", name=name)
        else:
            team.run("hold", name=name, each=True)
        time.sleep(quiet if many == 1 else quiet + settling)
        found = {
            f"{state} connections": float(sum(usage.connections(pid) for pid in team.pids)),
            f"{state} client": (usage.memory(team.pids) - before) / 2**20,
            f"{state} server": max(usage.memory(usage.tree(*contender.servers)) - served, 0) / 2**20,
        }
        for process in team.processes:
            process.kill()  # its waiters would not end
    return found


QUESTION = Question("connections", "How many connections does an idle, holding or waiting process cost?", measure)
