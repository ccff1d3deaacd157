"""What users of Alembic and of SQLAlchemy's ORM need."""
