"""A test kit for your own code: pytest fixtures, an in-memory client, a clock that the test moves, chaos verbs.

The in-memory database of `tests/robustness/simulation/`, which is compared with Postgres call by call, is its seed.

The test kit has not landed yet.
"""
