-- Looks at a schedule without locking anything, for a caller of claim_slot(). No `decision` means
-- that there may be something to decide, with the row locked. Otherwise the result is what
-- claim_slot() replies.
CREATE OR REPLACE FUNCTION look_at_schedule(
    s schedules,
    attempt uuid,
    OUT decision text,
    OUT slot timestamptz,
    OUT next_slot timestamptz,
    OUT wait double precision,
    OUT asked_at timestamptz
)
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    r slot_runs;
    running timestamptz;
    alive double precision := 1e9;
    due record;
BEGIN
    asked_at := clock_timestamp();
    FOR r IN SELECT * FROM slot_runs AS o
        WHERE o.name = s.name AND (o.outcome IS NULL OR o.outcome = 'queued') ORDER BY o.run
    LOOP
        -- A queued slot, or the caller's own run, is decided with the row locked.
        alive := CASE
            WHEN r.outcome = 'queued' OR r.attempt = look_at_schedule.attempt THEN 0
            ELSE least(alive, run_is_alive_for(r.lock, r.token))
        END;
        EXIT WHEN alive <= 0;
        running := r.slot;
    END LOOP;
    due := slots_between(s, undecided_after(s), asked_at);
    IF s.paused_at IS NOT NULL THEN
        decision := 'paused';
    ELSIF alive > 0 AND plan_suffices(s, asked_at) AND due.slots = 0 THEN
        decision := CASE WHEN running IS NULL THEN 'none' ELSE 'running' END;
    ELSIF alive > 0 AND plan_suffices(s, asked_at) AND running IS NOT NULL
        AND (s.kind = 'delay' OR s.catch_up = 'all' AND s.overlap <> 'allow')
    THEN
        -- The slots that are due start when the run has ended.
        decision := 'running';
    ELSE
        RETURN;
    END IF;
    IF s.kind = 'delay' AND running IS NOT NULL THEN
        slot := running;
    ELSE
        slot := coalesce(s.decided_until, running);
        next_slot := slot_after(s, greatest(asked_at, undecided_after(s)));
    END IF;
    wait := least(alive, date_part('epoch', next_slot) - date_part('epoch', asked_at));
END
$$;
