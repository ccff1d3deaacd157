"""Turn termination signals into exceptions, so that a command cleans up before it ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Raise SystemExit on SIGTERM or SIGHUP, so that every `finally` runs."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, handle) for number in not_ignored(signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ignore_signals() -> Iterator[None]:
    """Ignore SIGINT, SIGTERM and SIGHUP in a body that ends by itself."""
    signals = not_ignored(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, frame: None) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def not_ignored(*signals: signal.Signals) -> list[signal.Signals]:
    """Return the signals that this process does not ignore.

    A signal that is ignored must stay so: nohup ignores SIGHUP, and a shell ignores SIGINT for background jobs.
    """
    return [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def exit_on_first_signal() -> Iterator[None]:
    """Raise on the first SIGINT, SIGTERM or SIGHUP, and ignore later ones, so that they cannot disturb the cleanup.

    A user who has pressed Ctrl-C may well press it again. The cleanup must end by itself.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    exiting = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal exiting
        if not exiting:
            exiting = True
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = {number: signal.signal(number, handle) for number in not_ignored(*signals)}
    try:
        yield
    finally:
        if not exiting:  # otherwise the program is about to end, which no signal should disturb either
            for number, handler in before.items():
                signal.signal(number, handler)
