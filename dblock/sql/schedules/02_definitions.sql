-- The definitions of schedules: what they may be, and what a change means for the slots.

-- Refuses a definition outside the documented limits. The message names the schedule.
CREATE OR REPLACE FUNCTION check_schedule(
    name text, every interval, cron text, zone text, delay interval, catch_up text, overlap text, delivery text,
    grace interval, at_least interval
) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE
AS $$
DECLARE
    period CONSTANT interval := coalesce(every, delay);
BEGIN
    IF name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 400 THEN
        RAISE EXCEPTION 'A schedule''s name takes 1 to 400 bytes; this one has %.', coalesce(octet_length(name), 0)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF num_nonnulls(every, cron, delay) <> 1 THEN
        RAISE EXCEPTION 'Schedule % takes exactly one of every, cron and delay; got %.',
            quote_literal(name), num_nonnulls(every, cron, delay)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF cron IS NULL AND (date_part('epoch', period) BETWEEN 0.1 AND 31622400) IS NOT TRUE THEN
        RAISE EXCEPTION 'The interval of schedule % is %; it must lie between 100 ms and 366 days.',
            quote_literal(name), period
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF cron IS NOT NULL AND (octet_length(cron) BETWEEN 1 AND 512 AND octet_length(zone) BETWEEN 1 AND 128) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'Schedule % takes a cron expression of at most 512 bytes and a time zone of at most 128.',
            quote_literal(name)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (catch_up IN ('none', 'latest', 'all') AND overlap IN ('skip', 'queue', 'allow')
        AND delivery IN ('at-most-once', 'at-least-once')) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'Schedule % takes catch_up none, latest or all, overlap skip, queue or allow, and delivery at-most-once or at-least-once; got %, % and %.',
            quote_literal(name), quote_nullable(catch_up), quote_nullable(overlap), quote_nullable(delivery)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF grace IS NOT NULL AND (date_part('epoch', grace) BETWEEN 0 AND 31622400) IS NOT TRUE
        OR at_least IS NOT NULL AND (date_part('epoch', at_least) BETWEEN 0 AND 86400) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'The grace of schedule % lies between 0 and 366 days, and its at_least between 0 and 24 h; got % and %.',
            quote_literal(name), grace, at_least
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF overlap = 'allow' AND at_least IS NOT NULL THEN
        RAISE EXCEPTION 'Schedule % lets its runs overlap, so it cannot have an at_least.', quote_literal(name)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN true;
END
$$;

-- Returns whether two definitions have the same slots.
CREATE OR REPLACE FUNCTION same_slots(one schedules, other schedules) RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$
    SELECT (one.kind, one.expression, one.zone, one.period) IS NOT DISTINCT FROM
        (other.kind, other.expression, other.zone, other.period)
$$;

-- Returns whether two definitions treat their slots alike.
CREATE OR REPLACE FUNCTION same_rules(one schedules, other schedules) RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$
    SELECT (one.catch_up, one.overlap, one.delivery, one.grace, one.at_least) IS NOT DISTINCT FROM
        (other.catch_up, other.overlap, other.delivery, other.grace, other.at_least)
$$;

-- Gives a schedule, whose row the caller has locked, the definition that is wanted. If its slots
-- change, slots that the old definition left undecided are recorded as missed, and the schedule
-- starts with the next slot of the new one.
CREATE OR REPLACE FUNCTION define_schedule(
    s schedules, wanted schedules, is_new boolean, actor text, asked_at timestamptz
) RETURNS schedules
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    -- Slots before this moment do not count for a definition that is new or changed.
    starts_at timestamptz;
    due record;
BEGIN
    IF is_new OR NOT same_slots(s, wanted) THEN
        -- The tick of cron that registers a schedule comes a moment after its slot. One slot at
        -- most counts of those before. A delay starts at once, but after every decided slot.
        starts_at := CASE wanted.kind
            WHEN 'delay' THEN greatest(asked_at, s.decided_until + interval '1 microsecond')
            ELSE asked_at - least(interval '60 seconds', wanted.period) + interval '1 microsecond'
        END;
        IF NOT is_new THEN
            -- The newest slot is left undecided if it counts for the new definition, which may have
            -- the same slot.
            due := slots_between(s, undecided_after(s), asked_at);
            IF due.last_slot >= starts_at THEN
                due := slots_between(s, undecided_after(s), due.last_slot - interval '1 microsecond');
            END IF;
            IF s.kind <> 'delay' AND s.paused_at IS NULL THEN
                PERFORM record_unrun_slots(s, 'missed', due.slots, due.first_slot, due.last_slot);
            END IF;
            s.decided_until := greatest(s.decided_until, due.last_slot);
        END IF;
        PERFORM record_schedule_event(
            s.name, CASE WHEN is_new THEN 'registered' ELSE 'changed' END, actor,
            concat_ws(' ', wanted.kind, coalesce(wanted.expression, wanted.period::text), wanted.zone)
        );
        s.kind := wanted.kind;
        s.expression := wanted.expression;
        s.zone := wanted.zone;
        s.period := wanted.period;
        s.since := starts_at;
        s.upcoming := '{}';
        s.planned_until := CASE s.kind WHEN 'cron' THEN undecided_after(s) END;
        s.changed_at := asked_at;
    END IF;
    UPDATE schedules AS o
    SET kind = s.kind, expression = s.expression, zone = s.zone, period = s.period, since = s.since,
        upcoming = s.upcoming, planned_until = s.planned_until, changed_at = s.changed_at,
        decided_until = s.decided_until, catch_up = wanted.catch_up, overlap = wanted.overlap,
        delivery = wanted.delivery, grace = wanted.grace, at_least = wanted.at_least
    WHERE o.name = s.name
    RETURNING o.* INTO s;
    RETURN s;
END
$$;

-- Returns whether the slots of a schedule are known for long enough: those of a cron expression are
-- computed by clients and stored.
CREATE OR REPLACE FUNCTION plan_suffices(s schedules, moment timestamptz) RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$
    SELECT s.kind <> 'cron'
        OR (SELECT count(*) FROM unnest(s.upcoming) AS u (slot) WHERE u.slot > plan_suffices.moment) >= 2
$$;

-- Adds slots of a cron expression to those that are known. Decided slots are dropped, so that the
-- plan does not grow.
CREATE OR REPLACE FUNCTION extend_plan(s schedules, plan timestamptz[], asked_at timestamptz) RETURNS schedules
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
BEGIN
    s.upcoming := ARRAY(
        SELECT u.slot FROM unnest(s.upcoming) AS u (slot) WHERE u.slot > undecided_after(s)
        UNION
        SELECT p.slot FROM unnest(extend_plan.plan) AS p (slot)
        WHERE p.slot > s.planned_until AND p.slot < extend_plan.asked_at + interval '100 years'
        ORDER BY 1 LIMIT 100000
    );
    s.planned_until := greatest(s.planned_until, s.upcoming[cardinality(s.upcoming)]);
    UPDATE schedules AS o SET upcoming = s.upcoming, planned_until = s.planned_until WHERE o.name = s.name;
    RETURN s;
END
$$;
