"""A framework that is not installed: its module names the extra, and no other module needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.second_stage, pytest.mark.beside_others]

FRAMEWORKS = {"fastapi": "starlette", "celery": "celery", "dramatiq": "dramatiq"}


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", FRAMEWORKS)
def test_missing_framework_is_named_with_its_extra(module: str) -> None:
    done = run(f"import sys; sys.modules[{FRAMEWORKS[module]!r}] = None; import dblock.integrations.{module}")
    assert f"pip install 'dblock[{module}]'" in done.stderr


def test_integrations_import_no_framework_but_their_own() -> None:
    names = [*FRAMEWORKS.values(), "fastapi", "django", "apscheduler"]
    for module in ("fastapi", "celery", "dramatiq", "sqlalchemy", "apscheduler", "task_locks"):
        done = run(f"import sys, dblock.integrations.{module}; print([n for n in {names!r} if n in sys.modules])")
        own = {FRAMEWORKS.get(module)} - {None}
        assert done.stdout == f"{sorted(own)}\n", done.stderr
