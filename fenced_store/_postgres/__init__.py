"""Connections, names and values: how fenced_store talks to Postgres."""
