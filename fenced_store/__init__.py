"""The resource side of a lock: keys, transactions and tables that refuse a writer whose fencing token is stale.

    store = FencedStore(engine)
    with client.lock("invoice:42") as lease:
        store.put("invoice:42", body, fence=lease)  # StaleTokenError if a newer holder wrote or claimed it

A token is an integer from dblock, or from any other lock service whose tokens rise with every grant.
"""

import logging
import os
import threading
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fenced_store._postgres.identifiers import row
    from fenced_store._postgres.values import Stored, Value
    from fenced_store.audit import Rejection, high_water, rejections
    from fenced_store.errors import (
        AccessDenied,
        ClaimTimeout,
        FenceAhead,
        FenceBroken,
        FencedStoreError,
        InvalidArgument,
        LoginRefused,
        MissingToken,
        NotInstalled,
        ObjectBusy,
        ObjectDamaged,
        OutcomeUnknown,
        StaleTokenError,
        StoreClosed,
        TransactionConflict,
        Unavailable,
        VersionConflict,
        WriteTimeout,
    )
    from fenced_store.fencing import fence
    from fenced_store.integrations.orm import FencedMixin, translate_errors
    from fenced_store.schema import ddl, grant, install, uninstall
    from fenced_store.store import AsyncFencedStore, FencedStore
    from fenced_store.tables import Protection, protect, protected, unprotect

__all__ = [
    "AccessDenied",
    "AsyncFencedStore",
    "ClaimTimeout",
    "FenceAhead",
    "FenceBroken",
    "FencedMixin",
    "FencedStore",
    "FencedStoreError",
    "InvalidArgument",
    "LoginRefused",
    "MissingToken",
    "NotInstalled",
    "ObjectBusy",
    "ObjectDamaged",
    "OutcomeUnknown",
    "Protection",
    "Rejection",
    "StaleTokenError",
    "StoreClosed",
    "Stored",
    "TransactionConflict",
    "Unavailable",
    "Value",
    "VersionConflict",
    "WriteTimeout",
    "ddl",
    "fence",
    "grant",
    "high_water",
    "install",
    "protect",
    "protected",
    "rejections",
    "row",
    "translate_errors",
    "uninstall",
    "unprotect",
]

_HOME = {
    "AsyncFencedStore": "store",
    "FencedMixin": "integrations.orm",
    "FencedStore": "store",
    "Protection": "tables",
    "Rejection": "audit",
    "Stored": "_postgres.values",
    "Value": "_postgres.values",
    "ddl": "schema",
    "fence": "fencing",
    "grant": "schema",
    "high_water": "audit",
    "install": "schema",
    "protect": "tables",
    "protected": "tables",
    "rejections": "audit",
    "row": "_postgres.identifiers",
    "translate_errors": "integrations.orm",
    "uninstall": "schema",
    "unprotect": "tables",
}
"""The module of each name. All other names are errors."""

logging.getLogger("fenced_store").addHandler(logging.NullHandler())

_importing = threading.RLock()
"""Held while a name is imported at its first use, and during a fork: a module that another thread was importing could
never be imported in the child."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release
    )


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: SQLAlchemy takes half a second, and not every name needs it."""
    if name not in __all__:
        raise AttributeError(f"module 'fenced_store' has no attribute {name!r}")
    with _importing:
        found = getattr(import_module(f"fenced_store.{_HOME.get(name, 'errors')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
