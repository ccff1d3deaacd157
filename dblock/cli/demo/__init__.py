"""`dblock demo`: two workers, one lock and a ledger, told as it happens.

Real processes contend for one lock on a real Postgres and keep a ledger under it. Nothing they report is made up:
each event is recorded when it has happened, with the token and the time that came with it, and the sums come from
the ledger's tables. `story` is the conductor, who gives the cues; `cast` is how it starts, freezes and ends the
workers; `worker` is what they run; `ledger` is what they write to; `events` is what is left of it all, for others to
draw.
"""
