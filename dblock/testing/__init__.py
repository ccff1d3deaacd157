"""A test kit for your own code: a pytest plugin, clients in memory, chaos verbs, and a proof that a function is fenced.

The plugin needs no import: see docs/guides/testing.md. `MemoryClient` and `AsyncMemoryClient` need no database.
`prove_fenced` finds the statements of your own function at which a holder that was paused would do harm.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dblock.testing.assertions import assert_order, no_waits
    from dblock.testing.chaos_verbs import Chaos
    from dblock.testing.clock import Clock, WaitsForever
    from dblock.testing.memory.chaos import MemoryChaos
    from dblock.testing.memory.client import AsyncMemoryClient, MemoryClient
    from dblock.testing.memory.database import MemoryDatabase, NotInMemory
    from dblock.testing.proof import Report, Statement, Unsafe, prove_fenced

__all__ = [
    "AsyncMemoryClient",
    "Chaos",
    "Clock",
    "MemoryChaos",
    "MemoryClient",
    "MemoryDatabase",
    "NotInMemory",
    "Report",
    "Statement",
    "Unsafe",
    "WaitsForever",
    "assert_order",
    "no_waits",
    "prove_fenced",
]

_HOME = {
    "AsyncMemoryClient": "memory.client",
    "Chaos": "chaos_verbs",
    "Clock": "clock",
    "MemoryChaos": "memory.chaos",
    "MemoryClient": "memory.client",
    "MemoryDatabase": "memory.database",
    "NotInMemory": "memory.database",
    "Report": "proof",
    "Statement": "proof",
    "Unsafe": "proof",
    "WaitsForever": "clock",
    "assert_order": "assertions",
    "no_waits": "assertions",
    "prove_fenced": "proof",
}
"""The module of each name. A module is imported when one of its names is first used, so that the plugin is light."""


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'dblock.testing' has no attribute {name!r}")
    found = getattr(import_module(f"dblock.testing.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
