"""Dramatiq: actors that run under a lock.

    broker.add_middleware(LockMiddleware(DSN))  # or a Client; before the actors are declared

    @dramatiq.actor(lock="report:{customer}")
    def build_report(customer): ...

Guarantee: while a worker runs the actor, it holds the lock whose name the arguments give. See `task_locks` for what
happens to the lease. The lock does not prevent duplicates: a message that is sent twice is processed twice, one after
the other.

The options of an actor:

- `lock`: the name of its lock, with placeholders for its parameters. A wrong one fails where the actor is declared.
- `lock_on_busy`: "retry" (the default) enqueues the message again, with a delay of `lock_retry_in` seconds. That does
  not count as one of its `max_retries`. An actor that is called directly raises LockTimeout. "skip" skips the message,
  because another worker is doing the work right now. "wait" keeps the thread waiting, at most `lock_timeout` seconds,
  and then raises LockTimeout. "raise" raises it at once, and the middleware Retries decides.
- `lock_ttl`: the ttl of the lease, which is renewed while the actor runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from dblock.errors import ConfigurationError, InvalidArgument
from dblock.integrations.task_locks import TaskLocks

try:
    from dramatiq.middleware import Middleware, MiddlewareError, SkipMessage
except ImportError as error:
    raise ConfigurationError("dblock.integrations.dramatiq needs Dramatiq: pip install 'dblock[dramatiq]'.") from error

_message: ContextVar[tuple[Any, Any] | None] = ContextVar("dblock_dramatiq_message", default=None)

OPTIONS = ("lock", "lock_on_busy", "lock_retry_in", "lock_timeout", "lock_ttl")


class ActorRefused(InvalidArgument, MiddlewareError):
    """An actor has options for a lock that cannot be used."""


class LockMiddleware(TaskLocks, Middleware):
    """The middleware that lets actors run under locks."""

    @property
    def actor_options(self) -> set[str]:
        """The options of an actor that this middleware reads."""
        return {*OPTIONS}

    def before_declare_actor(self, broker: Any, actor: Any) -> None:
        """Wrap the function of an actor that has a lock."""
        given = {name: actor.options[name] for name in OPTIONS if actor.options.get(name) is not None}
        try:
            if "lock" in given:
                actor.fn = self._wrapped(actor.fn, given)
            elif given:
                raise InvalidArgument(f"It has the option {min(given)!r}, and no lock.")
        except Exception as error:
            # Dramatiq would only log it, and the actor would run without its lock.
            raise ActorRefused(f"Actor {actor.actor_name!r} is not declared: {error}") from error

    def _wrapped(self, function: Any, given: dict[str, Any]) -> Any:
        return self.wrap(
            function,
            given["lock"],
            on_busy=given.get("lock_on_busy", "retry"),
            retry_in=given.get("lock_retry_in", 5.0),
            timeout=given.get("lock_timeout"),
            options={"ttl": given["lock_ttl"]} if "lock_ttl" in given else {},
        )

    def before_process_message(self, broker: Any, message: Any) -> None:
        """Remember the message, in case its lock is busy."""
        _message.set((broker, message))

    def after_process_message(
        self, broker: Any, message: Any, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        """Forget the message."""
        _message.set(None)

    def is_queued(self, function: Callable[..., Any]) -> bool:
        """Return whether the actor processes its own message. Code may also call it directly, such as another actor."""
        current = _message.get()
        return current is not None and current[0].get_actor(current[1].actor_name).fn is function

    def requeue(self, seconds: float) -> None:
        """Enqueue a copy of the message, and skip this one."""
        current = _message.get()
        assert current is not None
        broker, message = current
        # A copy, because the consumer acknowledges its own message after this.
        broker.enqueue(message.copy(), delay=int(seconds * 1000))
        raise SkipMessage("Its lock is busy. The message is processed later.")

    def skip(self) -> Any:
        """Skip the message."""
        raise SkipMessage("Its lock is busy.")
