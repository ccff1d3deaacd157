"""A small Django project, written to a folder, whose `manage.py` a test starts as a real program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

SETTINGS = """
import json, os
SECRET_KEY = "test"
USE_TZ = True
INSTALLED_APPS = json.loads(os.environ["PROJECT_APPS"])
DATABASES = {"default": json.loads(os.environ["PROJECT_DATABASE"])}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DBLOCK_MIGRATE = json.loads(os.environ.get("PROJECT_DBLOCK", "{}"))
"""
MANAGE = """
import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""
MODELS = """
from django.db import models
class Shop(models.Model):
    name = models.TextField()
class Sale(models.Model):
    shop = models.ForeignKey(Shop, models.CASCADE)
"""
HEAD = """
from django.db import migrations, models
import django.db.models.deletion
"""
# A foreign key is deferred SQL: Django would record this migration after its transaction.
INITIAL = f"""{HEAD}
class Migration(migrations.Migration):
    initial = True
    dependencies = []
    operations = [
        migrations.CreateModel("Shop", [("id", models.BigAutoField(primary_key=True)), ("name", models.TextField())]),
        migrations.CreateModel("Sale", [
            ("id", models.BigAutoField(primary_key=True)),
            ("shop", models.ForeignKey("shop.Shop", django.db.models.deletion.CASCADE)),
        ]),
        migrations.RunSQL("CREATE TABLE steps (step text, at timestamptz DEFAULT clock_timestamp())"),
        migrations.RunSQL("INSERT INTO steps VALUES ('initial')"),
    ]
"""
CONCURRENTLY = f"""{HEAD}
class Migration(migrations.Migration):
    atomic = False
    dependencies = [("shop", "0001_initial")]
    operations = [
        migrations.RunSQL("CREATE INDEX CONCURRENTLY shop_name ON shop_shop (name)", "DROP INDEX shop_name"),
        migrations.RunSQL("INSERT INTO steps VALUES ('index')", ""),
    ]
"""


def step(name: str, after: str, statement: str, backwards: str = "SELECT 1") -> str:
    """Return a migration that runs one statement in its transaction."""
    return f"""{HEAD}
class Migration(migrations.Migration):
    dependencies = [("shop", {after!r})]
    operations = [
        migrations.RunSQL({statement!r}, {backwards!r}),
        migrations.RunSQL("INSERT INTO steps VALUES ({name!r})".replace('"', "'"), "SELECT 1"),
    ]
"""


class Project:
    """A project with one app, `shop`."""

    def __init__(self, folder: Path, dsn: str, *, gated: bool = True) -> None:
        self.folder, self.dsn, self.gated = folder, dsn, gated
        self.options: dict[str, object] = {"ttl": 3}
        self.search_path = "public"
        app = folder / "shop"
        (app / "migrations").mkdir(parents=True)
        for name, text in {
            "settings.py": SETTINGS, "manage.py": MANAGE, "shop/__init__.py": "", "shop/models.py": MODELS,
            "shop/migrations/__init__.py": "", "shop/migrations/0001_initial.py": INITIAL,
            "shop/migrations/0002_index.py": CONCURRENTLY,
        }.items():  # fmt: skip
            (folder / name).write_text(text)

    def add(self, name: str, text: str) -> None:
        """Add a migration."""
        (self.folder / "shop/migrations" / f"{name}.py").write_text(text)

    def environment(self) -> dict[str, str]:
        given = conninfo_to_dict(self.dsn)
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": given["dbname"], "USER": given.get("user", ""), "PASSWORD": given.get("password", ""),
            "HOST": given.get("host", ""), "PORT": given.get("port", ""),
            "OPTIONS": {"options": f"-c search_path={self.search_path}"},
        }  # fmt: skip
        apps = ["dblock.integrations.django", "shop"] if self.gated else ["shop"]
        return os.environ | {
            "PROJECT_DATABASE": json.dumps(database),
            "PROJECT_APPS": json.dumps(apps),
            "PROJECT_DBLOCK": json.dumps(self.options),
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start manage.py."""
        return subprocess.Popen(
            [sys.executable, "manage.py", *arguments],
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def run(self, *arguments: str) -> str:
        """Run manage.py to its end, and return what it printed."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err
        return out + err
