"""What a proof has found."""

from __future__ import annotations

from dataclasses import dataclass, field

from dblock.testing.proof.gate import Statement

SHOWN = 120

REMEDY = (
    "A holder that is paused before one of these writes after the next holder. Call lease.assert_held(connection) in "
    "the transaction that writes, or write through a fence of fenced_store."
)


@dataclass(frozen=True)
class Unsafe:
    """A statement at which a holder that was frozen did harm afterwards."""

    number: int
    """Which of the function's statements, counted from 1."""
    statement: Statement
    difference: str
    """What the tables should have held, and what they held."""

    def __str__(self) -> str:
        at = f"at {self.statement.location}" if self.statement.location else "outside of the function"
        return f"statement {self.number}, {at}:\n      {shortened(self.statement.text)}\n      {self.difference}"


@dataclass
class Report:
    """The statements of a function, and those of them that are not safe."""

    function: str
    statements: list[Statement]
    unsafe: list[Unsafe] = field(default_factory=list)

    @property
    def safe(self) -> bool:
        """Whether the function did no harm at any statement at which it was frozen."""
        return not self.unsafe

    def __str__(self) -> str:
        count = len(self.statements)
        if self.safe:
            return f"{self.function} is fenced: frozen at each of its {count} statements, it did no harm."
        lines = [f"{self.function} is not fenced. {len(self.unsafe)} of its {count} statements are not safe:"]
        return "\n".join([*lines, *(f"  - {one}" for one in self.unsafe), REMEDY])


def shortened(text: str) -> str:
    """Return a statement on one line, without its end if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 1]}…"
