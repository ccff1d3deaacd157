"""Integrations with Alembic and with SQLAlchemy's ORM."""
