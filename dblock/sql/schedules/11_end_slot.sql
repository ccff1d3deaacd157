-- Records how the run under this token ended, and releases its lock, in one transaction. `outcome`
-- is `succeeded` or `failed`. Returns what is recorded. NULL means that nothing was recorded: the
-- grant does not hold the lock any more, and the run counts as died. A retry returns what the first
-- call recorded.
CREATE OR REPLACE FUNCTION end_slot(
    name text, token bigint, outcome text, exit_code integer DEFAULT NULL, error text DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_durably();
    r slot_runs;
    ended timestamptz;
BEGIN
    IF (end_slot.outcome IN ('succeeded', 'failed')) IS NOT TRUE THEN
        RAISE EXCEPTION 'A run of schedule % ends as succeeded or failed; got %.',
            quote_nullable(end_slot.name), quote_nullable(end_slot.outcome)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM 1 FROM schedules AS s WHERE s.name = end_slot.name FOR NO KEY UPDATE;
    SELECT * INTO r FROM slot_runs AS o WHERE o.name = end_slot.name AND o.token = end_slot.token;
    IF NOT FOUND OR r.outcome IS NOT NULL THEN
        RETURN CASE WHEN r.outcome IN ('succeeded', 'failed') THEN r.outcome END;
    END IF;
    IF NOT release(r.lock, end_slot.token) THEN
        RETURN NULL;
    END IF;
    -- Not before its beginning, if the clock was set back: a delay counts from this moment, and its
    -- next slot must come after the slot of this run.
    ended := greatest(clock_timestamp(), r.claimed_at);
    UPDATE slot_runs AS o
    SET outcome = end_slot.outcome, ended_at = ended, exit_code = end_slot.exit_code,
        error = left(end_slot.error, 8192)
    WHERE o.run = r.run;
    UPDATE schedules AS s SET last_ended_at = ended WHERE s.name = end_slot.name;
    RETURN end_slot.outcome;
END
$$;
