"""Find the line of the user's code that caused something, to name it in a message."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import NamedTuple

PACKAGES = Path(__file__).parents[2]

NOT_THE_USERS = (
    f"{PACKAGES / 'dblock'}{os.sep}",
    f"{PACKAGES / 'fenced_store'}{os.sep}",
    f"{Path(os.__file__).parent}{os.sep}",  # the standard library, and site-packages inside it
    f"{os.sep}site-packages{os.sep}",
    "<",  # <frozen …> and <string>
)


UNKNOWN = "a line that is not known"
"""Stands for the line in a message if none was found."""


class Location(NamedTuple):
    """A line of code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        try:
            shown = str(Path(self.file).relative_to(Path.cwd()))
        except (ValueError, OSError):
            shown = self.file
        return f"{shown}:{self.line} in {self.function}"


def caller_location() -> Location | None:
    """Return the innermost line of the calling thread that is the user's own; None if there is none."""
    return user_location(sys._getframe(1))


def user_location(frame: FrameType | None) -> Location | None:
    """Return the innermost line from this frame outwards that is the user's own; None if there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(NOT_THE_USERS) and NOT_THE_USERS[3] not in file:
            return Location(file, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None
