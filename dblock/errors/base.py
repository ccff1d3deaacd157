"""The base of every error, and the errors of arguments, settings and closed clients."""

from __future__ import annotations


class DblockError(Exception):
    """The base of every error that dblock raises."""

    may_be_done = False
    """Whether what was asked for may have been done, because no reply says that it was not."""


class InvalidArgument(DblockError, ValueError):
    """An argument is outside its documented limits. Nothing was sent."""


class ConfigurationError(InvalidArgument):
    """No database is named, or a setting of the environment or of a file cannot be used. Nothing was sent."""


class ClientClosed(DblockError):
    """The client was closed and cannot be used again."""

    def __init__(self, may_be_done: bool = False) -> None:
        super().__init__("This client is closed. Create a new one.")
        self.may_be_done = may_be_done

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.may_be_done,)


class EmbeddedError(DblockError):
    """The embedded Postgres could not be started, found or stopped."""
