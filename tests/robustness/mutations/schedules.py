"""Bugs in schedules: slots decided twice or not at all, or ended by a stale run."""

from __future__ import annotations

from tests.robustness.mutations import Bug, Edit

CLAIM, END, HELPERS = "10_claim_slot.sql", "11_end_slot.sql", "01_schedules.sql"

BUGS = (
    Bug(
        "slot chosen without the row locked",
        "decides about a slot without locking the schedule's row, so that two hosts decide about it",
        ("slots",),
        workload="schedules",
        seconds=6.0,
        slow_edits=(
            Edit(
                CLAIM,
                "    asked_at := clock_timestamp();\n\n    -- The caller's own",
                "    asked_at := clock_timestamp();\n    PERFORM pg_sleep(0.02) WHERE random() < 0.5;\n\n"
                "    -- The caller's own",
            ),
        ),
        edits=(
            Edit(
                CLAIM,
                "SELECT * INTO s FROM schedules AS o WHERE o.name = claim_slot.name FOR NO KEY UPDATE;",
                "SELECT * INTO s FROM schedules AS o WHERE o.name = claim_slot.name;",
            ),
        ),
    ),
    Bug(
        "decided slots are forgotten",
        "does not record up to which slot everything is decided",
        ("slots",),
        workload="schedules",
        seconds=4.0,
        edits=(
            Edit(
                CLAIM,
                "    SET decided_until = s.decided_until, last_claimed_at = asked_at,",
                "    SET last_claimed_at = asked_at,",
            ),
        ),
    ),
    Bug(
        "death is not recorded",
        "leaves the row of a run that died as it is, and runs the slot again",
        ("slots",),
        workload="schedules",
        fault="kill",
        seconds=8.0,
        edits=(
            Edit(
                CLAIM,
                "        UPDATE slot_runs AS o SET outcome = 'died', ended_at = again.ended_at"
                " WHERE o.run = again.run;",
                "        NULL;",
            ),
        ),
    ),
    Bug(
        "dead run is not repeated",
        "records the death of a run, and does not run its slot again although it must run at least once",
        ("slots",),
        workload="schedules",
        fault="kill",
        seconds=8.0,
        edits=(
            Edit(
                CLAIM,
                "        ELSIF s.delivery = 'at-least-once' THEN\n            again := r;",
                "        ELSIF false THEN\n            again := r;",
            ),
        ),
    ),
    Bug(
        "backlog runs its newest slot only",
        "runs the newest of the slots that are due, although all of them must run",
        ("slots",),
        workload="schedules",
        fault="stop-server",
        strikes=4,
        edits=(Edit(CLAIM, "        candidate := due.first_slot;", "        candidate := due.last_slot;"),),
    ),
    Bug(
        "stale end is recorded",
        "records the outcome of a run whether or not it still holds its lock",
        ("slots",),
        workload="schedules",
        fault="freeze",
        seconds=10.0,
        edits=(
            Edit(
                END,
                "    IF NOT FOUND OR r.outcome IS NOT NULL THEN\n"
                "        RETURN CASE WHEN r.outcome IN ('succeeded', 'failed') THEN r.outcome END;\n    END IF;\n"
                "    IF NOT release(r.lock, end_slot.token) THEN\n        RETURN NULL;\n    END IF;\n",
                "    PERFORM release(r.lock, end_slot.token);\n",
            ),
        ),
    ),
    Bug(
        "living run counts as dead",
        "takes every run that has not ended for dead, and grants its slot again",
        ("slots", "linearizability"),
        workload="schedules",
        seconds=4.0,
        edits=(
            Edit(
                HELPERS,
                "    IF seen.expires_at > clock_timestamp() THEN\n        IF seen.presence IS NULL OR",
                "    PERFORM free_lock(run_is_over.lock);\n"
                "    IF seen.expires_at > clock_timestamp() AND false THEN\n        IF seen.presence IS NULL OR",
            ),
            Edit(
                HELPERS,
                "    IF NOT FOUND THEN\n        RETURN 0;\n    END IF;\n    IF seen.seconds > 0",
                "    RETURN 0;\n    IF seen.seconds > 0",
            ),
        ),
    ),
)
