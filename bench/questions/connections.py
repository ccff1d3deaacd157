"""How many connections, and how much memory, does a process cost that is idle, holds a lock or waits for one?

Each state is entered by a new process with one client, and measured once it has been quiet for a while. The memory is
that of the client's process beyond the same process before its first lock, and that of the server's processes for it.
Pages that processes share are divided among them.
"""

from __future__ import annotations

import time
from functools import partial

from bench.harness import usage
from bench.harness.arena import LEASED, SESSION
from bench.harness.contender import Contender
from bench.harness.question import Question, Run
from bench.harness.rounds import Block, Sample
from bench.harness.table import Column, Goal, Table
from bench.harness.workers import Team

STATES = ("idle", "holding", "waiting", "100 held", "100 waiting")

COLUMNS = (
    *(
        Column(f"{state} connections", f"{state}: connections", drawn=state in STATES[:3], checked=0.01)
        for state in STATES
    ),
    *(Column(f"{state} client", f"{state}: client MB", digits=1, drawn=False) for state in ("holding", "100 waiting")),
    *(Column(f"{state} server", f"{state}: server MB", digits=1, drawn=False) for state in ("holding", "100 waiting")),
)

GOALS = tuple(Goal("dblock", f"{state} connections", "", 1) for state in ("holding", "waiting"))


def measure(run: Run) -> list[Table]:
    contenders = run.arena.contenders("dblock", "dblock, asyncio", *LEASED, "redis-py, asyncio", *SESSION)
    states = run.pick(STATES, STATES[:3])
    blocks: dict[str, Block] = {
        one.name: partial(_states, one, states, run.pick(6.0, 0.2), run.pick(1.0, 0.2)) for one in contenders
    }
    table = Table("connections", "one process with one client", "redis-py", COLUMNS)
    return [table.fill(run.interleave(blocks, 1), GOALS)]


def _states(contender: Contender, states: tuple[str, ...], quiet: float, settling: float) -> Sample:
    found: Sample = {}
    for state in states:
        many = 100 if state.startswith("100") else 1
        kind = ("task" if contender.is_async else "thread") if many > 1 else "process"
        name = f"state {state} {contender.name}"
        with Team(contender, 1) as other, Team(contender, many, kind) as team:
            before, served = usage.memory(team.pids), usage.memory(usage.tree(contender.pid))
            if state == "idle":
                team.run("pairs", seconds=0.1)
            elif "waiting" in state:
                other.run("hold", name=name)
                served = usage.memory(usage.tree(contender.pid))
                team.run("begin_to_wait", name=name)
            else:
                team.run("hold", name=name, each=True)
            time.sleep(quiet if many == 1 else quiet + settling)
            found[f"{state} connections"] = sum(usage.connections(pid) for pid in team.pids)
            found[f"{state} client"] = (usage.memory(team.pids) - before) / 2**20
            found[f"{state} server"] = max(usage.memory(usage.tree(contender.pid)) - served, 0) / 2**20
            for process in team.processes:
                process.kill()  # its waiters would not end
    return found


QUESTION = Question("connections", "How many connections does an idle, holding or waiting process cost?", measure)
