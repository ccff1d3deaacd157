"""A framework that is not installed: its module names the extra, and no other module needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.second_stage]

FRAMEWORKS = {"fastapi": "starlette", "celery": "celery", "dramatiq": "dramatiq"}

SHARED = ("task_locks", "interruption", "sent_tasks")
"""Modules for several frameworks, which import none of them."""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", FRAMEWORKS)
def test_missing_framework_is_named_with_its_extra(module: str) -> None:
    done = run(f"import sys; sys.modules[{FRAMEWORKS[module]!r}] = None; import dblock.integrations.{module}")
    assert f"pip install 'dblock[{module}]'" in done.stderr


@pytest.mark.parametrize("module", [*FRAMEWORKS, "sqlalchemy", "apscheduler", *SHARED])
def test_integration_imports_no_framework_but_its_own(module: str) -> None:
    names = [*FRAMEWORKS.values(), "fastapi", "django", "apscheduler"]
    # What a framework imports itself does not count: Celery looks for Django.
    first = "import celery; celery.current_task" if module == "celery" else f"import {FRAMEWORKS.get(module, 'sys')}"
    script = f"{first}; import sys; before = {{*sys.modules}}; import dblock.integrations.{module}; "
    done = run(f"{script} print([name for name in {names!r} if name in {{*sys.modules}} - before])")
    assert done.stdout == "[]\n", done.stderr
