"""A small Django project, written to a folder, whose `manage.py` a test starts as a program."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

import dblock
from tests.support import isolation
from tests.support.eventually import eventually

ROOT = Path(dblock.__file__).parent.parent

SETTINGS = """
import json, os
SECRET_KEY = "test"
USE_TZ = True
INSTALLED_APPS = json.loads(os.environ["PROJECT_APPS"])
DATABASES = json.loads(os.environ["PROJECT_DATABASES"])
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DBLOCK_MIGRATE = json.loads(os.environ["PROJECT_DBLOCK"])
"""
MANAGE = """
import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""
APP = """
import os, pathlib, time

def pause():
    "Wait until the test goes on, if it has asked for it."
    if "PAUSE" in os.environ:
        folder = pathlib.Path(os.environ["PAUSE"])
        (folder / "paused").touch()
        while not (folder / "go").exists():
            time.sleep(0.02)

if "PAUSE_BEFORE" in os.environ:
    from django.db.migrations.recorder import MigrationRecorder
    record = MigrationRecorder.record_applied

    def record_later(self, app, name):
        if name == os.environ["PAUSE_BEFORE"]:
            pause()
        record(self, app, name)

    MigrationRecorder.record_applied = record_later
"""
MODELS = """
from django.db import models
class Shop(models.Model):
    name = models.TextField()
class Sale(models.Model):
    shop = models.ForeignKey(Shop, models.CASCADE)
"""
HEAD = """
from django.contrib.postgres.operations import AddIndexConcurrently, RemoveIndexConcurrently
from django.db import migrations, models
import django.db.models.deletion
import shop

SQL = migrations.RunSQL
PAUSE = migrations.RunPython(lambda apps, schema_editor: shop.pause(), migrations.RunPython.noop)

def note(step):
    return SQL(f"INSERT INTO steps VALUES ('{step}')", SQL.noop)
"""
# A foreign key is deferred SQL: Django would record this migration after its transaction.
INITIAL = """
SQL("CREATE TABLE steps (step text, at timestamptz DEFAULT clock_timestamp())", "DROP TABLE steps"),
migrations.CreateModel("Shop", [("id", models.BigAutoField(primary_key=True)), ("name", models.TextField())]),
migrations.CreateModel("Sale", [
    ("id", models.BigAutoField(primary_key=True)),
    ("shop", models.ForeignKey("shop.Shop", django.db.models.deletion.CASCADE)),
]),
note("initial"),
"""
CONCURRENTLY = 'AddIndexConcurrently("shop", models.Index(fields=["name"], name="shop_name")), note("index")'

_numbers = itertools.count()


def migration(operations: str, after: str | None, *, atomic: bool = True, more: str = "") -> str:
    """Return the text of a migration."""
    return f"""{HEAD}
class Migration(migrations.Migration):
    atomic = {atomic}
    dependencies = [{"" if after is None else f"('shop', {after!r})"}]
    {more}
    operations = [
{operations}
    ]
"""


class Program:
    """A manage.py that was started. Its output, of both kinds, is in a file."""

    def __init__(self, pid: int, output: Path, poll: Callable[[], int | None]) -> None:
        self.pid = pid
        self._output = output
        self._poll = poll

    def poll(self) -> int | None:
        """Return the exit code; None while the program runs."""
        return self._poll()

    def wait(self, timeout: float = 120.0) -> int:
        """Wait for the end, and return the exit code."""
        eventually(lambda: self._poll() is not None, lambda: f"the end of manage.py: {self.said}", timeout)
        code = self._poll()
        assert code is not None
        return code

    @property
    def said(self) -> str:
        """What the program has printed so far."""
        return self._output.read_text() if self._output.exists() else ""

    def signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        # The launcher reaps the program a moment before its exit code can be read.
        with contextlib.suppress(ProcessLookupError):
            if self._poll() is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the program, also if it was stopped, and wait for its end."""
        self.signal(signal.SIGKILL)
        self.wait()


class Project:
    """A project with one app, `shop`."""

    def __init__(self, folder: Path, dsn: str, *, apps: tuple[str, ...] = ("dblock.integrations.django",)) -> None:
        self.folder, self.dsn, self.apps = folder, dsn, apps
        # Unless it says otherwise, the ttl is long, so that a busy machine does not lose the lease.
        self.options: dict[str, object] = {"ttl": 60}
        self.databases: dict[str, dict[str, object]] = {}
        self.packages: Path | None = None
        (folder / "shop/migrations").mkdir(parents=True)
        for name, text in {
            "settings.py": SETTINGS,
            "manage.py": MANAGE,
            "shop/__init__.py": APP,
            "shop/models.py": MODELS,
            "shop/migrations/__init__.py": "",
        }.items():
            (folder / name).write_text(text)
        self.add("0001_initial", INITIAL)

    def add(self, name: str, operations: str, after: str | None = None, *, atomic: bool = True, more: str = "") -> None:
        """Add a migration, or replace it. Its text is the list of its operations."""
        text = migration(operations, after, atomic=atomic, more=more)
        (self.folder / "shop/migrations" / f"{name}.py").write_text(text)

    def add_index(self) -> None:
        """Add the migration 0002_index, which builds an index concurrently."""
        self.add("0002_index", CONCURRENTLY, "0001_initial", atomic=False)

    def database(self, schema: str | None = None) -> dict[str, object]:
        """Return the entry of DATABASES for the project's database, and for one of its schemas."""
        given = conninfo_to_dict(self.dsn)
        options = {} if schema is None else {"options": f"-c search_path={schema}"}
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": given["dbname"],
            "USER": given.get("user", ""),
            "PASSWORD": given.get("password", ""),
            "HOST": given.get("host", ""),
            "PORT": given.get("port", ""),
            "OPTIONS": options,
        }

    def environment(self, schema: str | None = None, **more: str) -> dict[str, str]:
        """Return the variables for manage.py."""
        paths = [*([str(self.packages)] if self.packages else []), str(ROOT)]
        return {
            **os.environ,
            "PYTHONPATH": ":".join(paths),
            "PROJECT_DATABASES": json.dumps({"default": self.database(schema), **self.databases}),
            "PROJECT_APPS": json.dumps([*self.apps, "shop"]),
            "PROJECT_DBLOCK": json.dumps(self.options),
            **more,
        }

    def start(self, *arguments: str, real: bool = False, schema: str | None = None, **environment: str) -> Program:
        """Start manage.py: forked from a process that has imported Django, or as a real program."""
        output = self.folder / f"output{next(_numbers)}"
        environment = self.environment(schema, **environment)
        if not real and self.packages is None:
            return _launcher().start(arguments, self.folder, environment, output)
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "manage.py", *arguments],
                cwd=self.folder,
                env=environment,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
            )
        return Program(process.pid, output, process.poll)

    def run(self, *arguments: str, code: int = 0, schema: str | None = None, **environment: str) -> str:
        """Run manage.py to its end, check its exit code, and return what it printed."""
        program = self.start(*arguments, real=False, schema=schema, **environment)
        found = program.wait()
        assert found == code, program.said
        return program.said


class Launcher:
    """This process's launcher, see `django_launcher`."""

    def __init__(self) -> None:
        with isolation.kept():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.django_launcher"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        self._turn = threading.Lock()
        atexit.register(self.close)

    def start(self, arguments: tuple[str, ...], folder: Path, environment: dict[str, str], output: Path) -> Program:
        """Start manage.py in a folder."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        code = output.with_suffix(".code")
        request = {"argv": arguments, "cwd": str(folder), "env": environment, "out": str(output), "code": str(code)}
        with self._turn:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            pid = int(self._process.stdout.readline())
        return Program(pid, output, lambda: int(code.read_text()) if code.exists() else None)

    def close(self) -> None:
        """End the launcher."""
        self._process.communicate()


@functools.cache
def _launcher() -> Launcher:
    return Launcher()
