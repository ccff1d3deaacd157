"""Elections in the simulation: candidates that run the shipped campaign, and observers of the log."""
