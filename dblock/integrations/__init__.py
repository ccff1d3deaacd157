"""Glue for frameworks: Alembic, Django, FastAPI, Celery and others, one module each.

An optional dependency is imported only in the module of its framework. A missing one raises an error that names the
extra to install, as `fenced_store.http` does.
"""
