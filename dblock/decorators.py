"""Functions that run under a lock: `@client.locked("user:{user_id}")`.

Guarantee: the function runs only while its caller holds the lock whose name the arguments of the call give. A
placeholder that no parameter fills is refused where the decorator is applied, not at the first call.

The body of a generator runs after the call has returned. So a generator holds its lock from its first step to its end,
also between two steps, while its caller runs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import string
import types
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from dblock._core.options import Claimer, LockOptions, Seconds, brief, check_claims, check_name, is_text, lock_options
from dblock._core.slots import SKIPPED, Skipped
from dblock._runtime.runtime import TaskRuntime, ThreadRuntime
from dblock.errors import DblockError, InvalidArgument
from dblock.lease import AsyncLease, Lease, _cancelling
from dblock.lock import AsyncLock, Lock

P = ParamSpec("P")
R = TypeVar("R")

ON_BUSY = ("wait", "skip", "raise")

_current: ContextVar[Lease | AsyncLease] = ContextVar("dblock_lease")


class RunsLocked(Protocol):
    """Decorates a function that runs under a lock."""

    def __call__(self, function: Callable[P, R], /) -> Callable[P, R]: ...


class RunsOrSkips(Protocol):
    """Decorates a function that runs under a lock, or does not run and returns SKIPPED."""

    def __call__(self, function: Callable[P, R], /) -> Callable[P, R | Skipped]: ...


class AsyncRunsLocked(Protocol):
    """Decorates a coroutine function, or an asynchronous generator, that runs under a lock."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> Callable[P, Coroutine[Any, Any, R]]: ...

    @overload
    def __call__(self, function: Callable[P, AsyncIterator[R]], /) -> Callable[P, AsyncGenerator[R, Any]]: ...


class AsyncRunsOrSkips(Protocol):
    """Decorates a coroutine function that runs under a lock, or does not run and returns SKIPPED."""

    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> Callable[P, Coroutine[Any, Any, R | Skipped]]: ...


def current_lease() -> Lease | AsyncLease:
    """Return the lease under which the innermost `locked` function of this context runs.

    Child tasks and `asyncio.to_thread` inherit it, so that they can pass its token on and notice a loss. Raise
    DblockError outside of a `locked` function.
    """
    try:
        return _current.get()
    except LookupError:
        raise DblockError(
            "There is no current lease. Call current_lease() inside a function that `locked` decorates, or use the "
            "lease that `with` gives you."
        ) from None


@contextmanager
def _running_under(lease: Lease | AsyncLease) -> Iterator[None]:
    before = _current.set(lease)
    try:
        yield
    finally:
        _current.reset(before)


@contextmanager
def _step_under(lease: AsyncLease) -> Iterator[None]:
    """Let a loss of the lease cancel this task, until the step of a generator has ended well.

    Between two steps the task runs the generator's caller, which a loss must not cancel.
    """
    import asyncio

    body = asyncio.current_task()
    lease._body, lease._cancelling = body, _cancelling(body)
    with _running_under(lease):
        yield
    if not lease._cancelled_body:
        lease._body = None


def _steps(body: Generator[Any, Any, Any], lease: Lease) -> Generator[Any, Any, Any]:
    """Run each step of a generator under its lease. If the lease was lost between two steps, raise that in the body."""
    step: Callable[[], Any] = functools.partial(next, body)
    while True:
        try:
            with _running_under(lease):
                result = step()
        except StopIteration as done:
            return done.value
        try:
            sent = yield result
            lease.raise_if_lost()
            step = functools.partial(body.send, sent)
        except GeneratorExit:
            with _running_under(lease):
                body.close()
            raise
        except BaseException as error:
            step = functools.partial(body.throw, error)


class DecoratorSettings:
    """What a decorator was given, checked."""

    def __init__(
        self,
        template: str,
        on_busy: str,
        timeout: Seconds | None,
        claims: Sequence[str | Claimer],
        **options: Any,
    ) -> None:
        if not is_text(template) or not template:
            raise InvalidArgument(f"The name of a locked function's lock is text; got {brief(template)}.")
        if on_busy not in ON_BUSY:
            raise InvalidArgument(f"on_busy is one of {', '.join(map(repr, ON_BUSY))}; got {brief(on_busy)}.")
        if on_busy != "wait" and timeout is not None:
            raise InvalidArgument(f'on_busy="{on_busy}" tries once, so it takes no timeout; got {brief(timeout)}.')
        self.on_busy = on_busy
        self.name = template
        self.claims, claimers = check_claims(template, claims)
        patience = 0 if on_busy == "raise" else timeout
        self.options = lock_options("a", timeout=patience, claims=claimers, **options)

    def names_for(self, function: Callable[..., Any]) -> Callable[..., LockOptions]:
        """Return a function that makes the lock's options from the arguments of a call."""
        templates = (self.name, *self.claims)
        wanted = {name for template in templates for name in _placeholders(template)}
        if not wanted:
            name, *claims = (_NAMES.vformat(template, (), {}) for template in templates)
            fixed = dataclasses.replace(self.options, name=check_name(name), claims=tuple(claims))
            return lambda *args, **options: fixed
        signature = _signature(function)
        for field in sorted(wanted):
            _check_placeholder(field, self.name, function, signature)

        def made(*args: Any, **options: Any) -> LockOptions:
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            name, *claims = (_NAMES.vformat(template, (), bound.arguments) for template in templates)
            return dataclasses.replace(self.options, name=check_name(name), claims=check_claims(name, claims)[0])

        return made


class ThreadDecorator:
    """Makes a function run under a lock. From `Client.locked`."""

    def __init__(self, runtime: ThreadRuntime, settings: DecoratorSettings) -> None:
        self._runtime = runtime
        self._settings = settings

    def __call__(self, function: Any, /) -> Any:
        if isinstance(function, (classmethod, staticmethod)):
            return type(function)(self(function.__func__))
        _check_function(function)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            kind = "an asynchronous generator" if inspect.isasyncgenfunction(function) else "a coroutine function"
            raise InvalidArgument(f"{_shown(function)} is {kind}. Use AsyncClient.locked for it.")
        options_for = self._settings.names_for(function)
        skips = self._settings.on_busy == "skip"
        if inspect.isgeneratorfunction(function):
            _refuse_to_skip(function, skips)

            @functools.wraps(function)
            def locked_steps(*args: Any, **options: Any) -> Generator[Any, Any, Any]:
                with Lock(self._runtime, options_for(*args, **options), Lease).acquire() as lease:
                    return (yield from _steps(function(*args, **options), lease))

            return locked_steps

        @functools.wraps(function)
        def locked(*args: Any, **options: Any) -> Any:
            lock = Lock(self._runtime, options_for(*args, **options), Lease)
            lease = lock.try_acquire() if skips else lock.acquire()
            if lease is None:
                return SKIPPED
            with lease, _running_under(lease):
                return _checked(function, function(*args, **options))

        return locked


class TaskDecorator:
    """Makes a coroutine function run under a lock. From `AsyncClient.locked`."""

    def __init__(self, runtime: TaskRuntime, settings: DecoratorSettings) -> None:
        self._runtime = runtime
        self._settings = settings

    def __call__(self, function: Any, /) -> Any:
        if isinstance(function, (classmethod, staticmethod)):
            return type(function)(self(function.__func__))
        _check_function(function)
        if not inspect.iscoroutinefunction(function) and not inspect.isasyncgenfunction(function):
            raise InvalidArgument(
                f"{_shown(function)} is not a coroutine function, and would block the event loop. Use Client.locked "
                "for it."
            )
        options_for = self._settings.names_for(function)
        skips = self._settings.on_busy == "skip"
        if inspect.isasyncgenfunction(function):
            _refuse_to_skip(function, skips)

            @functools.wraps(function)
            async def locked_steps(*args: Any, **options: Any) -> AsyncGenerator[Any, Any]:
                lock = AsyncLock(self._runtime, options_for(*args, **options), AsyncLease)
                async with await lock.acquire() as lease:
                    body = function(*args, **options)
                    step = body.__anext__()
                    while True:
                        try:
                            with _step_under(lease):
                                result = await step
                        except StopAsyncIteration:
                            return
                        if lease._cancelled_body:
                            await body.aclose()
                            return  # the lease raises LeaseLost
                        try:
                            sent = yield result
                            lease.raise_if_lost()
                            step = body.asend(sent)
                        except GeneratorExit:
                            with _running_under(lease):
                                await body.aclose()
                            raise
                        except BaseException as error:
                            step = body.athrow(error)

            return locked_steps

        @functools.wraps(function)
        async def locked(*args: Any, **options: Any) -> Any:
            lock = AsyncLock(self._runtime, options_for(*args, **options), AsyncLease)
            lease = await (lock.try_acquire() if skips else lock.acquire())
            if lease is None:
                return SKIPPED
            async with lease:
                with _running_under(lease):
                    return _checked(function, await function(*args, **options))

        return locked


class _NameFormatter(string.Formatter):
    """Fills placeholders from the arguments of a call."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            value, first = super().get_field(field_name, args, kwargs)
        except (LookupError, AttributeError, TypeError) as error:
            raise InvalidArgument(
                f"The placeholder {{{field_name}}} of a lock's name has no value in this call: "
                f"{type(error).__name__} {error}. Nothing was run."
            ) from None
        kind: Any = type(value)
        if kind.__format__ is object.__format__ and kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
            raise InvalidArgument(
                f"The placeholder {{{field_name}}} of a lock's name has a value of type {kind.__qualname__}, whose "
                "text is its address in memory, so every process would have a lock of its own. Name one of its "
                "attributes, or define __str__."
            )
        return value, first

    def format_field(self, value: Any, format_spec: str) -> Any:
        try:
            return super().format_field(value, format_spec)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"The format {format_spec!r:.80} of a placeholder of a lock's name does not fit the value of type "
                f"{type(value).__qualname__} in this call: {error}. Nothing was run."
            ) from None


_NAMES = _NameFormatter()


def _placeholders(template: str) -> set[str]:
    """Return the fields of a template, also those inside of format specifications."""
    found = set()
    try:
        for _, field, spec, _ in _NAMES.parse(template):
            if field is not None:
                found.add(field)
                found |= _placeholders(spec or "")
    except ValueError as error:
        raise InvalidArgument(
            f"The name {brief(template)} cannot be read: {error}. Write {{{{ and }}}} for braces in the name itself."
        ) from None
    return found


def _check_placeholder(field: str, template: str, function: Any, signature: inspect.Signature) -> None:
    first, rest = re.fullmatch(r"([^.\[]*)(.*)", field, re.DOTALL).groups()  # type: ignore[union-attr]
    parameters = signature.parameters
    if first not in parameters:
        listed = ", ".join(parameters) or "none"
        raise InvalidArgument(
            f"The placeholder {{{field}}} in {brief(template)} names no parameter of {_shown(function)}. Its "
            f"parameters: {listed}."
        )
    variadic = parameters[first].kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if variadic and not rest.startswith("["):
        raise InvalidArgument(
            f"The placeholder {{{field}}} in {brief(template)} stands for any number of arguments of "
            f"{_shown(function)}. Name one of them, such as {{{first}[0]}}, or a parameter of its own."
        )


def _signature(function: Any) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"{_shown(function)} has no signature that could fill the placeholders of a lock's name."
        ) from None


def _check_function(function: Any) -> None:
    if not callable(function) or inspect.isclass(function):
        raise InvalidArgument(f"`locked` decorates a function; got {brief(function)}.")


def _refuse_to_skip(function: Any, skips: bool) -> None:
    if skips:
        raise InvalidArgument(
            f"{_shown(function)} is a generator, which cannot return SKIPPED, and its caller could not tell a busy "
            'lock from an empty result. Use on_busy="raise".'
        )


def _checked(function: Any, result: Any) -> Any:
    """Return the result, unless the function's body has yet to run: an undetected coroutine or generator."""
    if isinstance(result, (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)):
        if not isinstance(result, types.AsyncGeneratorType):
            result.close()
        raise InvalidArgument(
            f"{_shown(function)} returned a {type(result).__name__}, whose body would run after the lock is released. "
            "Decorate the function that has the body."
        )
    return result


def _shown(function: Any) -> str:
    return f"{getattr(function, '__qualname__', None) or brief(function)}()"
