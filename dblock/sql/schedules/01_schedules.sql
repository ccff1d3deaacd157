-- Schedules: the slots of a schedule, and what its ledger knows.
--
-- A slot is a moment on the database's clock at which a schedule is due. `schedules` has one row
-- per schedule: its definition, and up to which slot everything is decided. `slot_runs` is the
-- ledger: one row per decided slot, or one row for a series of slots that were skipped or missed.
--
-- The row of the schedule is always locked first, and the row of a lock after it.

-- Returns the name of the lock of a run. Runs that may overlap have a lock for each slot.
CREATE OR REPLACE FUNCTION run_lock(name text, overlap text, slot timestamptz) RETURNS text
LANGUAGE sql IMMUTABLE
AS $$
    SELECT 'once:' || run_lock.name || CASE run_lock.overlap
        WHEN 'allow' THEN to_char(run_lock.slot AT TIME ZONE 'UTC', '"@"YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
        ELSE ''
    END
$$;

-- Returns how many slots lie after `after`, up to `until`, and the first and last of them. The
-- slots of an interval are its multiples since 1970, so that every host counts the same ones. Those
-- of a cron expression are stored. A delay has at most one slot: when it is due.
CREATE OR REPLACE FUNCTION slots_between(
    s schedules,
    after timestamptz,
    until timestamptz,
    OUT slots bigint,
    OUT first_slot timestamptz,
    OUT last_slot timestamptz
)
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    step numeric;
    low numeric;
    high numeric;
BEGIN
    IF s.kind = 'every' THEN
        step := extract(epoch FROM s.period);
        low := floor(extract(epoch FROM after) / step) + 1;
        high := floor(extract(epoch FROM until) / step);
        slots := greatest(high - low + 1, 0);
        IF slots > 0 THEN
            first_slot := timestamptz 'epoch' + make_interval(secs => (low * step)::double precision);
            last_slot := timestamptz 'epoch' + make_interval(secs => (high * step)::double precision);
        END IF;
    ELSIF s.kind = 'cron' THEN
        SELECT count(*), min(u.slot), max(u.slot) INTO slots, first_slot, last_slot
        FROM unnest(s.upcoming) AS u (slot) WHERE u.slot > after AND u.slot <= until;
    ELSE
        first_slot := greatest(s.last_ended_at + s.period, s.since);
        slots := (first_slot > after AND first_slot <= until)::integer;
        IF slots = 0 THEN
            first_slot := NULL;
        END IF;
        last_slot := first_slot;
    END IF;
END
$$;

-- Returns the moment after which slots of this schedule are undecided.
CREATE OR REPLACE FUNCTION undecided_after(s schedules) RETURNS timestamptz
LANGUAGE sql IMMUTABLE
AS $$
    SELECT greatest(s.decided_until, s.since - interval '1 microsecond')
$$;

-- Returns the first slot after a moment, NULL if it is not known.
CREATE OR REPLACE FUNCTION slot_after(s schedules, after timestamptz) RETURNS timestamptz
LANGUAGE sql STABLE
AS $$
    SELECT n.first_slot FROM slots_between(
        s, slot_after.after, CASE s.kind WHEN 'every' THEN slot_after.after + s.period ELSE 'infinity' END
    ) AS n
$$;

-- Returns how late a slot may start: what the schedule says, or half of the time to the next slot,
-- at most ten minutes.
CREATE OR REPLACE FUNCTION slot_grace(s schedules, slot timestamptz) RETURNS interval
LANGUAGE sql STABLE
AS $$
    SELECT coalesce(
        s.grace,
        least(coalesce(s.period, slot_after(s, slot_grace.slot) - slot_grace.slot) / 2, interval '10 minutes'),
        interval '10 minutes'
    )
$$;

-- Returns whether the grant of a run is over: another grant, an expired lease or a dead holder. If
-- it is over, the row of the lock is locked until the end of the transaction, so that no
-- transaction that has proved the lease is still open.
CREATE OR REPLACE FUNCTION run_is_over(lock text, token bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    seen record;
BEGIN
    SELECT l.token, l.expires_at, l.presence INTO seen FROM distributed_locks AS l WHERE l.name = run_is_over.lock;
    IF NOT FOUND OR seen.token <> run_is_over.token THEN
        RETURN true;
    END IF;
    IF seen.expires_at > clock_timestamp() THEN
        IF seen.presence IS NULL OR (remaining_grace(seen.presence, true, true) <= 0) IS NOT TRUE
            OR NOT free_dead_holder(run_is_over.lock, seen.token, seen.presence)
        THEN
            RETURN false;
        END IF;
    END IF;
    PERFORM 1 FROM distributed_locks AS l
    WHERE l.name = run_is_over.lock AND l.token = run_is_over.token AND l.expires_at <= clock_timestamp()
    FOR UPDATE SKIP LOCKED;
    RETURN FOUND;
END
$$;

-- Returns for how many seconds a run is known to be alive, without locking anything. Zero or less
-- means that run_is_over() may be true.
CREATE OR REPLACE FUNCTION run_is_alive_for(lock text, token bigint) RETURNS double precision
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    seen record;
BEGIN
    SELECT date_part('epoch', l.expires_at) - date_part('epoch', clock_timestamp()) AS seconds, l.presence INTO seen
    FROM distributed_locks AS l WHERE l.name = run_is_alive_for.lock AND l.token = run_is_alive_for.token;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    IF seen.seconds > 0 AND seen.presence IS NOT NULL THEN
        RETURN least(seen.seconds, remaining_grace(seen.presence, false, true));
    END IF;
    RETURN seen.seconds;
END
$$;

-- Records what an operator did to a schedule, or that its definition changed, and deletes events
-- older than the schedule's newest hundred.
CREATE OR REPLACE FUNCTION record_schedule_event(name text, event text, actor text, reason text) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO schedule_events (at, name, event, actor, reason)
    VALUES (
        clock_timestamp(), record_schedule_event.name, record_schedule_event.event,
        -- The name that the caller gives, and the role that is certain.
        format('%s as %s', left(coalesce(record_schedule_event.actor, describe_session()), 400), session_user),
        left(record_schedule_event.reason, 2048)
    );
    DELETE FROM schedule_events AS e
    WHERE e.name = record_schedule_event.name AND e.number < (
        SELECT o.number FROM schedule_events AS o
        WHERE o.name = record_schedule_event.name ORDER BY o.number DESC OFFSET 99 LIMIT 1
    );
END
$$;

-- Records a series of slots that did not run, as one row. A series that follows one of the same
-- kind without a gap extends the earlier row.
CREATE OR REPLACE FUNCTION record_unrun_slots(
    s schedules, outcome text, slots bigint, first_slot timestamptz, last_slot timestamptz
) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
BEGIN
    IF record_unrun_slots.slots <= 0 THEN
        RETURN;
    END IF;
    UPDATE slot_runs AS r
    SET slots = r.slots + record_unrun_slots.slots, last_slot = record_unrun_slots.last_slot,
        ended_at = clock_timestamp()
    WHERE r.run = (SELECT max(o.run) FROM slot_runs AS o WHERE o.name = s.name)
      AND r.outcome = record_unrun_slots.outcome AND r.last_slot < record_unrun_slots.first_slot
      AND (
          SELECT n.slots = 0 FROM slots_between(
              s, r.last_slot, record_unrun_slots.first_slot - interval '1 microsecond'
          ) AS n
      );
    IF NOT FOUND THEN
        INSERT INTO slot_runs (name, slot, last_slot, slots, number, outcome, claimed_at, ended_at)
        VALUES (
            s.name, record_unrun_slots.first_slot, record_unrun_slots.last_slot, record_unrun_slots.slots, 0,
            record_unrun_slots.outcome, clock_timestamp(), clock_timestamp()
        );
    END IF;
END
$$;

-- Returns a moment as text that every version of Python reads.
CREATE OR REPLACE FUNCTION moment_as_text(moment timestamptz) RETURNS text
LANGUAGE sql STABLE
AS $$
    SELECT to_char(moment AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')
$$;

-- Returns a row of the ledger as list_schedules() shows it.
CREATE OR REPLACE FUNCTION run_as_json(r slot_runs) RETURNS jsonb
LANGUAGE sql STABLE
AS $$
    SELECT jsonb_build_object(
        'slot', moment_as_text(r.slot), 'last_slot', moment_as_text(r.last_slot), 'slots', r.slots,
        'number', r.number, 'token', r.token, 'holder', r.holder, 'outcome', r.outcome, 'exit_code', r.exit_code, 'error', r.error,
        'claimed_at', moment_as_text(r.claimed_at), 'ended_at', moment_as_text(r.ended_at),
        'seconds', round(date_part('epoch', coalesce(r.ended_at, clock_timestamp()) - r.claimed_at)::numeric, 3)
    )
$$;
