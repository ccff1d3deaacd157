"""Run the migrations of dblock's own schema.

Reached through `dblock.admin.schema`, which hands over an open connection (or none, to print the DDL instead),
with the schema to work in already first in the search path. Tables change by migrations, which are frozen
once released. Functions have no history worth replaying: on the way up their current bodies,
`dblock/sql/*.sql`, replace whatever was there.
"""

from alembic import context
from sqlalchemy import Connection

from dblock.admin.schema import VERSION_TABLE, function_files

schema: str = context.config.attributes["schema"]
connection: Connection | None = context.config.attributes.get("connection")

if connection is None:
    context.configure(
        dialect_name="postgresql",
        # With this style a percent sign in a function's body is printed once, not twice.
        dialect_opts={"paramstyle": "named"},
        version_table=VERSION_TABLE,
        version_table_schema=schema,
    )
else:
    context.configure(connection=connection, version_table=VERSION_TABLE, version_table_schema=schema)

with context.begin_transaction():
    if connection is None:
        for statement in context.config.attributes["preamble"]:
            # A name in it may hold what SQLAlchemy takes for a parameter.
            context.execute(statement.replace(":", "\\:"))
    context.run_migrations()
    if context.config.attributes["upgrading"]:
        for file in function_files():
            context.execute(file.read_text(encoding="utf-8"))
