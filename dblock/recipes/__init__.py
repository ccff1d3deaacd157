"""What people build from a lock: read/write locks, semaphores, elections, schedules, the migration gate, decorators.

One recipe is one module here, one test module in `tests/dblock/recipes/` and one page in `docs/recipes/`. A recipe
imports `dblock.lock`, `dblock.lease`, `dblock.client` and `dblock.errors`, and nothing below them. What must be atomic
is a function in `dblock/sql/`.

No recipe has landed yet.
"""
