"""Schedules in the simulation: hosts that run the shipped flows of slots, and the ledger that they share."""
