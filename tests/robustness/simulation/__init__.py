"""dblock's own code in a simulated world, in which a seed decides everything that goes wrong.

The shipped flows, waiters, leases, keep-alive and listener of dblock run in simulated processes against the database in
memory of `dblock.testing`. Time is a number in a queue of events, and one random.Random decides everything that is
random. Messages are late, overtaken, lost, or executed without a reply. Processes are stopped, cut off and killed, and
their connections are closed. Callers give up and time out. An operator force-releases locks, reaps, terminates single
sessions and restarts the database. The database crashes and forgets what was not on disk, or its standby is promoted
and has not received it.
All of that follows from the seed, so you can replay a run that fails step by step:

    python -m tests.robustness.simulation --seeds 100000 --processes 2
    python -m tests.robustness.simulation --seed 4711 --trace
    python -m tests.robustness.simulation --workload elections --seeds 1000

A run has one of four workloads: threads that use locks, threads that use read-write locks and semaphores, the
candidates and observers of an election, or the hosts of a schedule. The same faults happen to all of them.

The module `checks` states what must hold. The module `mutations` shows that the checks find bugs: each bug is put in,
and must be found (`--bugs`). `test_simulation.py` shows that the database in memory is like the real one: it sends the
same random calls to both.

| module | contents |
|---|---|
| world | time, randomness, the order of events, the story |
| database | the server around them: its disk, its standby, crashes and promotions |
| network | what can happen to a message |
| process, client, worker | a process, the client in it, a thread that uses locks |
| faults, run | what goes wrong and when; a storm, then calm |
| checks | what must hold |
| shared_locks | what read-write locks and semaphores add to all of these |
| recipes, elections, schedules | what the recipes add to all of these |
| mutations, many | bugs to find; many seeds |
| fidelity | the same calls for the store and for Postgres |

The simulation leaves out concurrent transactions (nothing is ever `busy` here; tests/dblock/sql and the model in spec/
cover them), the pool, threads, asyncio, how a client is closed, and names that are used for locks of two kinds. Of
schedules it leaves out cron expressions, pauses, and runs that queue or overlap.
"""
