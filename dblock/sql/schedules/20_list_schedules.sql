-- Returns the schedules, in the order of their names, or one of them.
--
-- `next_slot` is the first undecided slot, which may have passed. `overdue_since` is when the
-- schedule became overdue, NULL if it is not: its first undecided slot and the grace have passed,
-- or a run has not reported its end before its lease was over. If the clock was set back, slots
-- that lie ahead are decided already, and the schedule is overdue until the clock comes near them.
-- A schedule that is paused is not overdue, nor is one whose active run keeps a slot waiting. No
-- host needs to be alive for this. `runs` has the newest rows of the ledger, newest first, and
-- `missed` how many slots the ledger has as missed.
CREATE OR REPLACE FUNCTION list_schedules(name text DEFAULT NULL, max_runs integer DEFAULT 5)
RETURNS TABLE (
    name text,
    kind text,
    definition text,
    zone text,
    catch_up text,
    overlap text,
    delivery text,
    next_slot timestamptz,
    overdue_since timestamptz,
    paused_at timestamptz,
    paused_by text,
    pause_reason text,
    requested_at timestamptz,
    running bigint,
    missed bigint,
    skipped bigint,
    last_run jsonb,
    runs jsonb
)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT s.name, s.kind, coalesce(s.expression, s.period::text), s.zone, s.catch_up, s.overlap, s.delivery,
           n.slot,
           CASE
               WHEN s.paused_at IS NOT NULL THEN NULL
               WHEN dead.since IS NOT NULL THEN dead.since
               WHEN live.runs > 0 AND s.overlap <> 'allow' THEN NULL
               WHEN n.slot + slot_grace(s, n.slot) < clock_timestamp() THEN n.slot + slot_grace(s, n.slot)
               WHEN s.decided_until - slot_grace(s, s.decided_until) > clock_timestamp() THEN clock_timestamp()
           END,
           s.paused_at, s.paused_by, s.pause_reason, s.requested_at, live.runs, totals.missed, totals.skipped,
           (SELECT described.run FROM (
                SELECT run_as_json(r) AS run FROM slot_runs AS r
                WHERE r.name = s.name AND r.token IS NOT NULL ORDER BY r.run DESC LIMIT 1
            ) AS described),
           (SELECT coalesce(jsonb_agg(run_as_json(o) ORDER BY o.run DESC), '[]') FROM (
                SELECT * FROM slot_runs AS r WHERE r.name = s.name ORDER BY r.run DESC LIMIT list_schedules.max_runs
            ) AS o)
    FROM schedules AS s
    CROSS JOIN LATERAL (SELECT slot_after(s, undecided_after(s)) AS slot) AS n
    CROSS JOIN LATERAL (
        SELECT count(*) AS runs FROM slot_runs AS r JOIN distributed_locks AS l ON l.name = r.lock
        WHERE r.name = s.name AND r.outcome IS NULL AND l.token = r.token AND l.expires_at > clock_timestamp()
    ) AS live
    CROSS JOIN LATERAL (
        SELECT min(CASE WHEN l.token = r.token AND isfinite(l.expires_at) THEN l.expires_at ELSE r.claimed_at END)
            AS since
        FROM slot_runs AS r LEFT JOIN distributed_locks AS l ON l.name = r.lock
        WHERE r.name = s.name AND r.outcome IS NULL
          AND (l.token = r.token AND l.expires_at > clock_timestamp()) IS NOT TRUE
    ) AS dead
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(r.slots) FILTER (WHERE r.outcome = 'missed'), 0)::bigint AS missed,
               coalesce(sum(r.slots) FILTER (WHERE r.outcome = 'skipped'), 0)::bigint AS skipped
        FROM slot_runs AS r WHERE r.name = s.name
    ) AS totals
    WHERE list_schedules.name IS NULL OR s.name = list_schedules.name
    ORDER BY s.name
$$;
