"""Read the keys of the live screen from the terminal, and act on them.

Guarantee: `cbreak_mode` restores the terminal's modes, however its block is left.
"""

from __future__ import annotations

import codecs
import os
import select
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from dblock.cli.watch.model import ORDERS, ScreenState

SEQUENCES = {
    "[A": "up", "OA": "up", "[B": "down", "OB": "down", "[5~": "page up", "[6~": "page down",
    "[H": "home", "OH": "home", "[1~": "home", "[F": "end", "OF": "end", "[4~": "end",
}  # fmt: skip
"""The escape sequences of the known keys, without the escape."""
NAMED = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace", "\x1b": "escape", "\x15": "clear"}
ESCAPE_TIMEOUT = 0.03
"""Seconds after which a lone escape counts as the Esc key."""


@contextmanager
def cbreak_mode(terminal: int) -> Iterator[None]:
    """Let the terminal send each key at once and echo none. Ctrl-C keeps its meaning."""
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal, termios.TCSANOW)
        yield
    finally:
        # TCSANOW, because waiting for the output to drain may take forever if the user has stopped it.
        termios.tcsetattr(terminal, termios.TCSANOW, before)


class KeyReader:
    """Reads keys from a terminal."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.closed = False
        """Whether the terminal is gone."""

    def read(self) -> list[str]:
        """Return the pressed keys, each a character or a name. Call this only when there is something to read."""
        text = self._read_text()
        # The rest of an escape sequence may arrive a moment later.
        while text.endswith(("\x1b", "\x1b[", "\x1bO")) and select.select([self._terminal], [], [], ESCAPE_TIMEOUT)[0]:
            more = self._read_text()
            if not more:
                break
            text += more
        return keys_in(text)

    def _read_text(self) -> str:
        try:
            sent = os.read(self._terminal, 1024)
        except OSError:
            sent = b""
        self.closed = not sent
        return self._decoder.decode(sent)


def keys_in(text: str) -> list[str]:
    """Return the keys in the text that a terminal sent. Unknown escape sequences are dropped."""
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


MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -10, "page down": 10, "home": -(10**9), "end": 10**9}


def handle_key(screen: ScreenState, key: str, now: float) -> bool:
    """Act on a key; return False if the key means to quit."""
    if screen.typing:
        _edit_filter(screen, key)
    elif key == "q":
        return False
    elif key == "p":
        screen.pause(now)
    elif screen.show_help:
        screen.show_help = key not in ("escape", "backspace", "?", "enter")
        screen.scrolled = max(0, screen.scrolled + MOVES.get(key, 0)) if screen.show_help else 0
    elif key == "?":
        screen.show_help, screen.scrolled = True, 0
    elif screen.opened is not None:
        if key in ("escape", "backspace"):
            screen.opened = None
        screen.scrolled = max(0, screen.scrolled + MOVES.get(key, 0))
    else:
        _handle_list_key(screen, key)
    return True


def _handle_list_key(screen: ScreenState, key: str) -> None:
    if key == "s":
        screen.order = (screen.order + 1) % len(ORDERS)
    elif key == "r":
        screen.reverse = not screen.reverse
    elif key == "/":
        screen.typing = True
    elif key == "enter":
        screen.open()
    elif key == "escape":
        screen.filter = ""
    elif key in MOVES:
        screen.move(MOVES[key])


def _edit_filter(screen: ScreenState, key: str) -> None:
    if key == "enter":
        screen.typing = False
    elif key == "escape":
        screen.typing, screen.filter = False, ""
    elif key == "backspace":
        screen.filter = screen.filter[:-1]
    elif key == "clear":
        screen.filter = ""
    elif len(key) == 1 and key.isprintable():
        screen.filter += key
