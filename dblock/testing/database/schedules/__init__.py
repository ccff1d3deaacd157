"""Schedules in the database in memory."""
