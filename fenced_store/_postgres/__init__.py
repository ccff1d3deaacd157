"""How fenced_store reaches Postgres."""
