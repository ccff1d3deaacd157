"""What people build from a lock: read/write locks, semaphores, elections, schedules, the migration gate, decorators.

One recipe is one module or package here, with tests in `tests/dblock/recipes/` and a page in `docs/guides/`. A recipe
imports `dblock.lock`, `dblock.lease`, `dblock.client` and `dblock.errors`, and nothing below them. What must be atomic
is a function in `dblock/sql/`.
"""
