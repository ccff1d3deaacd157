"""Requests for several locks in the database in memory."""
