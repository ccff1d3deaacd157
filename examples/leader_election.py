"""Elect a leader, kill it, and read the log of terms.

A second process, web-1, leads first. It is killed, and web-2, which is this process, leads next under a higher token.
The log has every term and every vacancy, also the end that web-1 could not report.

    python examples/leader_election.py

The command line does the same for any program: dblock elect scheduler -- ./scheduler
"""

from __future__ import annotations

import os
import subprocess
import sys

import dblock
from dblock import embedded
from dblock.admin import schema

NAME = "example:scheduler"


def candidate(dsn: str) -> None:
    """Lead, say so, and work until the term must end."""
    with dblock.Client(dsn, holder="web-1") as client, client.election(NAME, ttl=5).lead() as term:
        print(term.token, flush=True)
        term.wait()


def main() -> None:
    dsn = os.environ.get("DBLOCK_DSN") or embedded.start().url
    schema.install(dsn)
    with dblock.Client(dsn, holder="web-2") as client:
        election = client.election(NAME, value={"url": "http://10.0.0.2"})
        with subprocess.Popen([sys.executable, __file__, dsn], stdout=subprocess.PIPE, text=True) as web_1:
            assert web_1.stdout is not None
            first = int(web_1.stdout.readline())
            leader = election.leader()
            print("the leader is", leader.holder if leader else None)
            web_1.kill()
        with election.lead(timeout=60) as term:
            print("web-1 was killed; web-2 leads, under a higher token:", term.token > first)
        for event in election.observe(first - 1, timeout=0):
            if isinstance(event, dblock.Leader):
                print("log:", event.holder, "leads")
            elif event.how == "resigned":
                print("log:", event.holder, "has resigned")
            else:  # died; behind a pooler it is found when the lease expires
                print("log:", event.holder, "was lost, and there is a vacancy")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        candidate(sys.argv[1])
    else:
        main()
