"""Perform the effects of the core's flows with psycopg, threads and tasks.

A runtime owns the parts of one client: a runner with its pool for the calls, a keep-alive for the leases, a listener
for the notifications, and the timer of the callbacks. The sync and async twins of a part share a file. The keep-alive
and the listener have no twin: they are threads for both clients.
"""
