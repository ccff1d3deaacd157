"""Django: views and management commands that run under a lock, without middleware.

    @locked("invoice:{invoice_id}")
    def close(request, invoice_id): ...

    class Command(LockedCommand, BaseCommand):
        lock = "nightly:{tenant}"

Guarantee: the view or command runs only while this process holds the lock. The locks are in the database of an alias of
DATABASES, `default` unless the setting says otherwise. There is one client for each process and alias. The setting,
with all that a Client accepts:

    DBLOCK_LOCKS = {"using": "default", "dsn": None, "schema": "dblock", …}

If the lock is busy, the response of a view is 423. If the lease is lost, it is 503, and an asynchronous view is
cancelled. A command whose lease is lost is interrupted, and exits with 76. None of them runs without the database.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.core.management.base import CommandError
from django.db import connections
from django.http import HttpResponse

from dblock.client import Client
from dblock.decorators import DecoratorSettings, current_lease
from dblock.errors import DatabaseError, DblockError, InvalidArgument, LeaseLost, LockTimeout
from dblock.integrations.django.async_views import run_locked
from dblock.integrations.django.conninfo import conninfo_of
from dblock.integrations.interruption import interrupted_by_loss
from dblock.lease import Lease
from dblock.lock import Lock
from dblock.recipes.migrations.exit_codes import exit_code

if TYPE_CHECKING:
    from dblock._core.options import Seconds

View = TypeVar("View", bound=Callable[..., Any])

BUSY, UNAVAILABLE = 423, 503
"""The status of a response if the lock is busy, and if the lease was lost or the database is away."""

_opening = threading.Lock()
_clients: dict[str, Client] = {}


def client(using: str | None = None) -> Client:
    """Return the client of this process for the database of an alias."""
    given = {**getattr(settings, "DBLOCK_LOCKS", {})}
    alias = using or given.pop("using", "default")
    given.pop("using", None)
    # From the connection, because the test runner gives its database another name than the settings.
    where = given.pop("dsn", None) or conninfo_of(connections[alias])
    with _opening:
        key = f"{where} {sorted(given.items())}"
        if key not in _clients:
            _clients[key] = Client(where, **given)
        return _clients[key]


def locked(
    name: str,
    *,
    timeout: Seconds = 0,
    retry_after: int = 1,
    using: str | None = None,
    **options: Any,
) -> Callable[[View], View]:
    """Return a decorator of views: each request runs under the lock whose name the arguments of the view give.

    `name` has placeholders for them, as in "invoice:{invoice_id}". A wrong placeholder fails at import. A request waits
    up to `timeout` for the lock, and is then refused with 423 and Retry-After. Inside of the view,
    `dblock.current_lease()` is its lease. The other options are those of `Client.locked`. A method of a class-based
    view can be decorated directly. A view may be a coroutine function: see `async_views`.
    """
    # Check the options at import, before the settings of the database are needed.
    checked = DecoratorSettings(name, "wait", timeout, options.get("claims", ()), **_without_claims(options))

    def decorate(view: View) -> View:
        options_for = checked.names_for(view)
        made: dict[Client, Any] = {}

        @functools.wraps(view)
        async def run_async(*args: Any, **given: Any) -> Any:
            lock = Lock(client(using)._runtime, options_for(*args, **given), Lease)
            try:
                return await run_locked(lock, functools.partial(view, *args, **given))
            except LockTimeout as error:
                return _refusal(BUSY, error, retry_after)
            except (LeaseLost, DatabaseError) as error:
                return _refusal(UNAVAILABLE, error, retry_after)

        @functools.wraps(view)
        def run(*args: Any, **given: Any) -> Any:
            here = client(using)
            if here not in made:
                made[here] = here.locked(name, timeout=timeout, **options)(view)
            try:
                return made[here](*args, **given)
            except LockTimeout as error:
                return _refusal(BUSY, error, retry_after)
            except (LeaseLost, DatabaseError) as error:
                return _refusal(UNAVAILABLE, error, retry_after)

        if not iscoroutinefunction(view):
            return run  # type: ignore[return-value]
        if options.get("reentrant"):
            raise InvalidArgument(f"The lock {name!r} of an asynchronous view cannot be reentrant.")
        return run_async  # type: ignore[return-value]

    return decorate


class LockedCommand:
    """A mixin for management commands, in front of BaseCommand: one process at a time runs the command.

    `lock` is the name of its lock, by default `command:` and the name of the command. It may have placeholders for the
    options of the command, as in "nightly:{tenant}". `on_busy` is "raise" (the command exits with 75), "skip" (it says
    so and exits with 0) or "wait", at most `lock_timeout` seconds.
    """

    lock: str | None = None
    on_busy: str = "raise"
    lock_timeout: Seconds | None = None
    lock_ttl: Seconds = 30.0
    lock_using: str | None = None

    def execute(self, *args: Any, **options: Any) -> Any:
        """Run the command under its lock."""
        name = self._lock_name(options)
        timeout = self.lock_timeout if self.on_busy == "wait" else 0
        try:
            lease = client(self.lock_using).lock(name, ttl=self.lock_ttl, timeout=timeout).acquire()
        except LockTimeout as error:
            if self.on_busy == "skip":
                self.stdout.write(f"Skipped: {error}")  # type: ignore[attr-defined]
                return None
            raise CommandError(f"dblock: {error}", returncode=exit_code(error)) from error
        except DblockError as error:
            raise CommandError(f"dblock: {error}", returncode=exit_code(error)) from error
        try:
            with lease, interrupted_by_loss(lease):
                self.lease = lease
                return super().execute(*args, **options)  # type: ignore[misc]
        except (LeaseLost, DatabaseError) as error:
            raise CommandError(f"dblock: {error}", returncode=exit_code(error)) from error

    def _lock_name(self, options: dict[str, Any]) -> str:
        if self.on_busy not in ("raise", "skip", "wait"):
            raise CommandError(f"dblock: on_busy is 'raise', 'skip' or 'wait'; got {self.on_busy!r}.")
        if self.lock is None:
            return f"command:{type(self).__module__.rpartition('.')[2]}"
        try:
            return self.lock.format(**options)
        except (LookupError, AttributeError, ValueError) as error:
            raise CommandError(
                f"dblock: the name {self.lock!r} cannot be filled from the options of the command: "
                f"{type(error).__name__} {error}."
            ) from error


def _refusal(status: int, error: DblockError, retry_after: int) -> Any:
    headers = {"Retry-After": str(retry_after)}
    return HttpResponse(str(error), status=status, headers=headers, content_type="text/plain; charset=utf-8")


def _without_claims(options: dict[str, Any]) -> dict[str, Any]:
    defaults = {"ttl": 30.0, "meta": None, "keep_alive": True, "fair": True, "reentrant": False}
    return defaults | {key: value for key, value in options.items() if key != "claims"}


__all__ = ["LockedCommand", "client", "current_lease", "locked"]
