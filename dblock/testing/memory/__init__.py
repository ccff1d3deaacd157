"""Clients without a database: the shipped flows, waiters, leases and keep-alive, over a database in memory.

The database in memory answers as the SQL functions do (`dblock.testing.database`). The clock is the test's
(`dblock.testing.clock`). So a memory client decides as a real client does, and only the transport, the threads and the
passing of time are replaced.

| module | contents |
|---|---|
| database | the database in memory, and the wake-ups that it sends |
| runtime | how a client runs flows and keeps leases alive, on the test's clock |
| waiters | waiters in the queues of the database |
| callbacks | the callbacks of leases |
| background | what a real client does in threads and tasks of its own |
| schedules | a host that runs the slots of a schedule when the clock gets there |
| client | MemoryClient and AsyncMemoryClient |
| at_once | a short way to acquire and release a free lock |
| client_clock | the clock of one client, which stops while the client is frozen |
| chaos | the chaos verbs |
"""
