"""One question per file. Each module has `QUESTION`."""

ORDER = ("pair", "throughput", "hand_off_rate", "hand_off_at_rest", "connections")
"""The order in which `make bench` asks."""
