"""Elections in the database in memory."""
