"""Perform the effects of the core's flows with psycopg, threads and tasks.

A runtime owns the parts of one client: a runner with its pool for the calls, a keep-alive for the leases, a listener
for the notifications, and the timer of the callbacks. The sync and async twins of a part share a file. The keep-alive
and the listener have no twin: they are threads for both clients.

Where to look
-------------
A client's parts     runtime, shutdown
A call               runner, pool, connection, socket_timeout, error_mapping
Which database       target, isolation (every connection is READ COMMITTED)
Leases               keepalive, callbacks, lost_events, owners (which thread or task holds what)
Waiters, presence    listener, listener_connection, socket_probe (is the connection open), wakeups
Asyncio              event_loop (watches the application's loop from the threads), asyncio_compat, own_loop
Threads and forks    threads (start one, or raise), forks (reset objects in a child), fork_safe_connection
User's transactions  user_transaction
"""
