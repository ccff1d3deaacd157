"""dblock's own code in a simulated world, where everything goes wrong that may, and the same again for each seed.

The real service, line, rounds, holds, leases and listening of dblock run in simulated processes against a database in
memory. Time is a number in a queue of events, chance is one random.Random, and messages are late, overtaken, lost, or
done without an answer. Processes are stopped, cut off and killed, their connections are closed; callers give up and
time out; an operator breaks locks and reaps; the database crashes and forgets what was not on disk, or its standby is
promoted and has never heard of it. All that follows from the seed, so a run that fails can be told again step by
step:

    python -m tests.robustness.simulation --seeds 100000 --processes 2
    python -m tests.robustness.simulation --seed 4711 --trace

What must hold is in `checks`. That the checks see anything is shown by `bugs`: each is put in, and must be found
(`--bugs`). That the database in memory is like the real one is shown by `test_simulation.py`, which puts the
same random calls to both.

| module | what it is |
|---|---|
| world | time, chance, the order of things, the story |
| tables, store, line | what dblock's SQL functions mean |
| database | the server around them: its disk, its standby, crashes and promotions |
| statements | what a client sends, put to the store |
| network | what may befall a message |
| process, client, worker | a process, the client in it, a thread that uses locks |
| fence | the resource, which refuses the stale |
| faults, run | what goes wrong and when; a storm, then calm |
| checks | what must hold |
| bugs, many | bugs to be found; many seeds |
| fidelity | the same calls for the store and for Postgres |

What it leaves out: two transactions at work at once (nothing is ever `busy` here; tests/sql and the model in spec/
are about that), the pool, threads, asyncio, and how a client is closed.
"""
