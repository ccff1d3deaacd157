"""The resource side of a lock: keys, transactions and tables that refuse a writer whose fencing token is stale.

    store = FencedStore(engine)
    with client.lock("invoice:42") as lease:
        store.put("invoice:42", body, fence=lease)  # StaleTokenError if a newer holder wrote or claimed it

A token is an integer from dblock, or from any other lock service whose tokens rise with every grant.
"""

import logging

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
    MissingToken,
    NotInstalled,
    ObjectBusy,
    ObjectDamaged,
    OutcomeUnknown,
    StaleTokenError,
    VersionConflict,
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
    "MissingToken",
    "NotInstalled",
    "ObjectBusy",
    "ObjectDamaged",
    "OutcomeUnknown",
    "Protection",
    "Rejection",
    "StaleTokenError",
    "Stored",
    "Value",
    "VersionConflict",
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

logging.getLogger("fenced_store").addHandler(logging.NullHandler())
