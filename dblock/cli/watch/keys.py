"""The keys of the live screen: how a terminal sends them, and what they mean.

Guarantee: a terminal that was changed to send each key at once is as it was before when this is left, however it is
left.
"""

from __future__ import annotations

import codecs
import os
import select
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from dblock.cli.watch.model import ORDERS, Seen

SEQUENCES = {
    "[A": "up", "OA": "up", "[B": "down", "OB": "down", "[5~": "page up", "[6~": "page down",
    "[H": "home", "OH": "home", "[1~": "home", "[F": "end", "OF": "end", "[4~": "end",
}  # fmt: skip
"""What follows an escape, for the keys that are known."""
NAMED = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace", "\x1b": "escape", "\x15": "clear"}
ALONE = 0.03
"""Seconds after which an escape that nothing follows is the key of that name."""


@contextmanager
def each_key_at_once(terminal: int) -> Iterator[None]:
    """Have a terminal send keys as they are pressed, and show none; Ctrl-C stays what it is."""
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal, termios.TCSANOW)
        yield
    finally:
        # At once, and not when all was written: that may never be, where the user has stopped the output.
        termios.tcsetattr(terminal, termios.TCSANOW, before)


class Keys:
    """Reads keys from a terminal."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.closed = False
        """Whether the terminal has gone."""

    def read(self) -> list[str]:
        """Return the keys that were pressed: a character each, or a name; there must be something to read."""
        text = self._some()
        # What follows an escape may come a moment later.
        while text.endswith(("\x1b", "\x1b[", "\x1bO")) and select.select([self._terminal], [], [], ALONE)[0]:
            more = self._some()
            if not more:
                break
            text += more
        return keys_in(text)

    def _some(self) -> str:
        try:
            sent = os.read(self._terminal, 1024)
        except OSError:
            sent = b""
        self.closed = not sent
        return self._decoder.decode(sent)


def keys_in(text: str) -> list[str]:
    """Return the keys in what a terminal has sent; a sequence that is not known is no key."""
    keys: list[str] = []
    at = 0
    while at < len(text):
        character = text[at]
        at += 1
        if character == "\x1b" and text[at : at + 1] in ("[", "O"):
            end = at + 1
            while end < len(text) and not "@" <= text[end] <= "~":
                end += 1
            name = SEQUENCES.get(text[at : end + 1])
            if name:
                keys.append(name)
            at = end + 1
        else:
            keys.append(NAMED.get(character, character))
    return keys


STEPS = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -10, "page down": 10, "home": -(10**9), "end": 10**9}


def press(seen: Seen, key: str, now: float) -> bool:
    """Do what a key means; False when it means to quit."""
    if seen.typing:
        _type(seen, key)
    elif key == "q":
        return False
    elif key == "p":
        seen.pause(now)
    elif seen.helping:
        seen.helping = key not in ("escape", "backspace", "?", "enter")
        seen.scrolled = max(0, seen.scrolled + STEPS.get(key, 0)) if seen.helping else 0
    elif key == "?":
        seen.helping, seen.scrolled = True, 0
    elif seen.opened is not None:
        if key in ("escape", "backspace"):
            seen.opened = None
        seen.scrolled = max(0, seen.scrolled + STEPS.get(key, 0))
    else:
        _in_list(seen, key)
    return True


def _in_list(seen: Seen, key: str) -> None:
    if key == "s":
        seen.order = (seen.order + 1) % len(ORDERS)
    elif key == "r":
        seen.reverse = not seen.reverse
    elif key == "/":
        seen.typing = True
    elif key == "enter":
        seen.open()
    elif key == "escape":
        seen.filter = ""
    elif key in STEPS:
        seen.move(STEPS[key])


def _type(seen: Seen, key: str) -> None:
    if key == "enter":
        seen.typing = False
    elif key == "escape":
        seen.typing, seen.filter = False, ""
    elif key == "backspace":
        seen.filter = seen.filter[:-1]
    elif key == "clear":
        seen.filter = ""
    elif len(key) == 1 and key.isprintable():
        seen.filter += key
