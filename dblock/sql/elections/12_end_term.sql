-- Ends a term and releases its lock in one transaction, and wakes the next candidate. `how` is
-- `resigned`, `transferred`, `outranked` or `failed`. False means that the token does not hold the
-- lock any more: the end is then recorded as what it was. In its own transaction it commits
-- asynchronously, like release(): a crash that loses it only keeps the term until its deadline.
CREATE OR REPLACE FUNCTION end_term(name text, token bigint, how text DEFAULT 'resigned') RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    lock_name CONSTANT text := election_lock(end_term.name);
    was_forced boolean;
    released boolean;
BEGIN
    IF (end_term.how IN ('resigned', 'transferred', 'outranked', 'failed')) IS NOT TRUE THEN
        RAISE EXCEPTION 'A term ends as resigned, transferred, outranked or failed; got %.',
            quote_nullable(end_term.how)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT l.forced_at IS NOT NULL INTO was_forced FROM distributed_locks AS l
    WHERE l.name = lock_name AND l.token = end_term.token;
    released := release(lock_name, end_term.token, durable => false);
    IF released THEN
        UPDATE terms AS t
        SET ended_at = clock_timestamp(), how = CASE WHEN was_forced THEN 'forced' ELSE end_term.how END
        WHERE t.name = end_term.name AND t.token = end_term.token AND t.ended_at IS NULL;
    ELSE
        PERFORM record_ended_term(end_term.name);
    END IF;
    RETURN released;
END
$$;
