"""Compare a kind of lock with a plain model of it, as a state machine of Hypothesis.

Each rule of a machine makes one call, and asserts that the reply is the model's. Hypothesis chooses the rules and their
arguments, and reduces a run that fails to the fewest calls that still fail. A machine is made for every run, and all
runs of a test share one database.

In each run Hypothesis leaves out some of the rules. It gives up a run in which no rule can be applied, so a machine
needs several rules without a precondition. The choices depend only on the machine's source, so that every run of the
suite makes the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

picks = st.integers(0, 7)
"""Chooses one of the items that exist at that moment: see `picked`."""


def picked(items: Sequence[Any], pick: int) -> Any:
    """Return the chosen item. There must be one."""
    return items[pick % len(items)]


class Machine(RuleBasedStateMachine):
    """Compares after each call, and counts the calls of all its runs."""

    steps = 0

    @invariant()
    def states_agree(self) -> None:
        type(self).steps += 1
        self.compare()

    def compare(self) -> None:
        """Assert that the state of the database is the model's."""
        raise NotImplementedError


def follow(kind: type[Machine], make: Callable[[], Machine], examples: int, steps: int) -> None:
    """Let Hypothesis make this many runs of so many calls."""
    kind.steps = 0
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=True,
        database=None,
        deadline=None,
        # All of them are about time, or about data that is discarded.
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(make, settings=chosen)  # type: ignore[arg-type]  # any factory will do
    # Hypothesis changes some runs into others that end early.
    assert kind.steps >= examples * steps / 2, "most of the calls were made"
