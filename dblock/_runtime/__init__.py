"""What performs: psycopg, threads and tasks."""
