"""The parts of a soak: who takes part, what is measured meanwhile, what is checked, and what counts as flat.

A soak looks for what only shows with time: memory, threads, files or connections that are not given back, tables that
grow, calls that get slower. It is no stress: the traffic leaves the machine room to breathe, so that what changes
from one minute to the next is the service and not the load.
"""
