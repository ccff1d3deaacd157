"""Being told to end: by a signal, as by an exception, so that a command leaves nothing behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Let everything be left in order when we are told to end by SIGTERM or SIGHUP."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in heard(signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def heard(*signals: signal.Signals) -> list[signal.Signals]:
    """Return those that are not ignored here, and must stay so: under nohup, say, or in the background of a shell."""
    return [one for one in signals if signal.getsignal(one) != signal.SIG_IGN]


@contextmanager
def ended_once() -> Iterator[None]:
    """Do the same, by Ctrl-C too, and let nothing disturb the tidying up, which ends by itself.

    Whoever has pressed Ctrl-C may well do so again.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    told = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if not told:
            told = True
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = {one: signal.signal(one, end) for one in heard(*signals)}
    try:
        yield
    finally:
        if not told:  # else what comes now is the end of the program, which nothing should disturb either
            for number, handler in before.items():
                signal.signal(number, handler)
