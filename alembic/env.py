"""Run the migrations of dblock's own schema.

`dblock.admin.schema` runs this file. It passes an open connection (or none, to print the DDL instead) whose search
path begins with the schema. Tables change by migrations, which are frozen once released. Functions have no
migrations: an upgrade replaces them with their current bodies in `dblock/sql/`.
"""

from alembic import context
from sqlalchemy import Connection

from dblock.admin.schema import VERSION_TABLE, function_files

schema: str = context.config.attributes["schema"]
connection: Connection | None = context.config.attributes.get("connection")

if connection is None:
    context.configure(
        dialect_name="postgresql",
        # With this style a percent sign in a function's body is not doubled.
        dialect_opts={"paramstyle": "named"},
        version_table=VERSION_TABLE,
        version_table_schema=schema,
    )
else:
    context.configure(connection=connection, version_table=VERSION_TABLE, version_table_schema=schema)

with context.begin_transaction():
    if connection is None:
        for statement in context.config.attributes["preamble"]:
            # SQLAlchemy would take a colon in a name for a parameter.
            context.execute(statement.replace(":", "\\:"))
    context.run_migrations()
    if context.config.attributes["upgrading"]:
        for file in function_files():
            context.execute(file.read_text(encoding="utf-8"))
