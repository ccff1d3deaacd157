"""An Alembic project in a folder, as a user has one, and its program `python -m alembic`."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import alembic.config
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import URL

import dblock

ROOT = Path(dblock.__file__).parent.parent

HEAD = """
from alembic import context
from sqlalchemy import create_engine, make_url, pool, text
{gate_import}

url = make_url(context.config.get_main_option("sqlalchemy.url"))

def migrate(connection):
    context.configure(connection=connection, {configure})
    with {gate}:
        with context.begin_transaction():
            {inside}
            context.run_migrations()

"""

OFFLINE = """
if context.is_offline_mode():
    context.configure(url=url, literal_binds=True, {configure})
    with {gate}:
        with context.begin_transaction():
            context.run_migrations()
else:
"""

STYLES = {
    "connect": """
    with create_engine(url, poolclass=pool.NullPool).connect() as connection:
        migrate(connection)
""",
    "begin": """
    with create_engine(url, poolclass=pool.NullPool).begin() as connection:
        migrate(connection)
""",
    "async": """
    import asyncio
    from sqlalchemy.ext.asyncio import create_async_engine

    async def run():
        engine = create_async_engine(url, poolclass=pool.NullPool)
        async with engine.connect() as connection:
            await connection.run_sync(migrate)
        await engine.dispose()

    asyncio.run(run())
""",
    "statement before": """
    with create_engine(url, poolclass=pool.NullPool).connect() as connection:
        connection.execute(text("SELECT 1"))
        migrate(connection)
""",
    "lock on the connection": """
    with create_engine(url, poolclass=pool.NullPool).connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(1)"))
        migrate(connection)
""",
    "committed statement before": """
    with create_engine(url, poolclass=pool.NullPool).connect() as connection:
        connection.execute(text("SET search_path TO public"))
        connection.commit()
        migrate(connection)
""",
    "autocommit": """
    with create_engine(url, poolclass=pool.NullPool, isolation_level="AUTOCOMMIT").connect() as connection:
        migrate(connection)
""",
}

TEMPLATE = '''"""${message}"""
from alembic import op
import sqlalchemy as sa

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade():
    ${upgrades if upgrades else "pass"}


def downgrade():
    ${downgrades if downgrades else "pass"}
'''


class Project:
    """A project whose env.py has the gate. `gate` has the arguments of migration_gate; None leaves the gate out.

    Unless it says otherwise, the ttl is long, so that a busy machine does not lose the lease.
    """

    def __init__(
        self,
        folder: Path,
        dsn: str,
        *,
        gate: str | None = "",
        style: str = "connect",
        driver: str = "psycopg",
        configure: str = "",
        inside: str = "",
        packages: Path | None = None,
    ) -> None:
        self.folder = folder
        self._packages = packages
        (folder / "versions").mkdir(parents=True)
        parameters = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
        url = URL.create(
            f"postgresql+{driver}",
            parameters.pop("user", None),
            parameters.pop("password", None),
            database=parameters.pop("dbname"),
            query=parameters,
        )
        shown = url.render_as_string(hide_password=False).replace("%", "%%")
        (folder / "alembic.ini").write_text(
            f"[alembic]\nscript_location = {folder}\npath_separator = os\nsqlalchemy.url = {shown}\n"
        )
        (folder / "script.py.mako").write_text(TEMPLATE)
        filled = {
            "gate_import": "" if gate is None else "from dblock.integrations.alembic import migration_gate",
            "gate": "__import__('contextlib').nullcontext()"
            if gate is None
            else f"migration_gate(context, **{{'ttl': 60}} | dict({gate}))",
            "configure": configure,
            "inside": inside,
        }
        (folder / "env.py").write_text(HEAD.format(**filled) + OFFLINE.format(**filled) + STYLES[style])

    def revision(self, name: str, down: object, upgrade: str, downgrade: str = "pass", more: str = "") -> None:
        """Add a revision; `down` is a name, a tuple of names, or None."""
        body = textwrap.indent(textwrap.dedent(upgrade).strip(), "    ")
        (self.folder / "versions" / f"{name}.py").write_text(
            "import ctypes, os, pathlib, signal, time\nimport sqlalchemy as sa\nfrom alembic import context, op\n\n"
            f"revision = {name!r}\ndown_revision = {down!r}\n{more}\n\n"
            f"def upgrade():\n{body}\n\n\ndef downgrade():\n    {downgrade}\n"
        )

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start the program."""
        paths = [*([str(self._packages)] if self._packages else []), str(ROOT)]
        return subprocess.Popen(
            [sys.executable, "-m", "alembic", *command],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": ":".join(paths)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *command: str) -> tuple[int, str]:
        """Run a command in this process, which spares the start of the program. Errors raise, but not exits."""
        before, output = os.getcwd(), io.StringIO()
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                alembic.config.main([*command])
        except SystemExit as error:
            return int(error.code or 0), output.getvalue()
        finally:
            os.chdir(before)
        return 0, output.getvalue()

    def run(self, *command: str, **environment: str) -> tuple[int, str]:
        """Run the program, and return its exit code and what it printed."""
        started = self.start(*command, **environment)
        out, err = started.communicate(timeout=120)
        return started.returncode, out + err
