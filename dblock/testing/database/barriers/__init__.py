"""Barriers and latches in the database in memory."""
