"""Run a soak: its traffic, what is measured and checked during it, and what counts as flat.

A soak looks for what shows only with time: memory, threads, files or connections that are not freed, tables that grow,
calls that get slower. It is not a stress test: the traffic leaves the machine spare capacity, so that a change from one
minute to the next comes from the service and not from the load.
"""
