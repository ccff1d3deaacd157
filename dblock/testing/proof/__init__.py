"""prove_fenced: find the statements of your own function at which a paused holder would do harm."""

from dblock.testing.proof.gate import Statement
from dblock.testing.proof.proving import prove_fenced
from dblock.testing.proof.report import Report, Unsafe

__all__ = ["Report", "Statement", "Unsafe", "prove_fenced"]
