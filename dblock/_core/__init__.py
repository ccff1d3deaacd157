"""What decides: no I/O, no threads; clock and randomness are injected."""
