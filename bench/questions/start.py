"""How long does a new process take to import the library and to hold its first lock?

Each is a Python process of its own: the import, then the connection and the first acquire. The lock is not new to its
server. dblock imports its driver with the first acquire. The processor time of the client is that of its whole process.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from functools import partial

from bench.harness.contender import Contender
from bench.harness.question import Question, Run
from bench.harness.rounds import Block, Cost, Sample
from bench.harness.table import Column, Table

COLUMNS = (
    Column("both", "import and first acquire ms", checked=0.3),
    Column("import", "import ms", drawn=False, checked=0.3),
    Column("acquire", "connect and acquire ms", drawn=False),
    Column("process", "whole process ms", drawn=False),
    Column("client", "client CPU ms"),
    Column("server", "server CPU ms", digits=1, drawn=False),
)

SCRIPT = """
import sys, time
began = time.perf_counter()
{imports}
imported = time.perf_counter()
{acquire}
acquired = time.perf_counter()
print(imported - began, acquired - imported)
{release}
"""

PROGRAMS = {
    "dblock": (
        "import dblock",
        "client = dblock.Client(sys.argv[1]); lease = client.lock('first').acquire()",
        "lease.release(); client.close()",
    ),
    "redis-py": (
        "import redis",
        "lock = redis.Redis.from_url(sys.argv[1]).lock('first', timeout=30); lock.acquire()",
        "lock.release()",
    ),
    "kazoo": (
        "from kazoo.client import KazooClient",
        "client = KazooClient(sys.argv[1]); client.start(); lock = client.Lock('/first'); lock.acquire()",
        "lock.release(); client.stop()",
    ),
    "pg_advisory_lock": (
        "import psycopg",
        "it = psycopg.connect(sys.argv[1], autocommit=True); it.execute('SELECT pg_advisory_lock(1)')",
        "it.close()",
    ),
    "sqlalchemy-dlock": (
        "from sqlalchemy import create_engine\nfrom sqlalchemy_dlock import create_sadlock\nimport psycopg",
        "made = create_engine('postgresql+psycopg://', creator=lambda: psycopg.connect(sys.argv[1]))\n"
        "it = made.connect(); lock = create_sadlock(it, 'first'); lock.acquire()",
        "lock.release()",
    ),
}


def measure(run: Run) -> list[Table]:
    blocks: dict[str, Block] = {}
    for one in run.arena.contenders(*PROGRAMS):
        imports, acquire, release = PROGRAMS[one.name]
        script = SCRIPT.format(imports=imports, acquire=acquire, release=release)
        blocks[one.name] = partial(_start, script, one)
    table = Table("start", "a new process", "pg_advisory_lock", COLUMNS)
    return [table.fill(run.interleave(blocks, 10))]


def _start(script: str, contender: Contender) -> Sample:
    server, before, began = Cost(contender.servers), resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-c", script, contender.where]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lasted, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    imported, acquired = map(float, done.stdout.split())
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "both": (imported + acquired) * 1e3,
        "import": imported * 1e3,
        "acquire": acquired * 1e3,
        "process": lasted * 1e3,
        "client": used * 1e3,
        "server": server.seconds() * 1e3,
    }


QUESTION = Question("start", "How long does a new process take to its first lock?", measure)
