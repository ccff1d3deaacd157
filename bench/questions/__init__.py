"""One question per file. Each module has `QUESTION`."""

ORDER = (
    *(
        "pair",
        "throughput",
        "hand_off_rate",
        "hand_off_at_rest",
        "microseconds",
        "fairness",
        "takeover",
        "connections",
        "crowd",
    ),
    *("renewal", "snapshot", "names", "slow_disk", "pgbouncer"),
    *("shared", "recipes", "fences", "http", "start"),
)
"""The order in which `make bench` asks."""
