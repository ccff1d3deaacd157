-- Counts a latch down, and opens it when nothing remains. The first call creates the latch. A latch
-- that is open stays open. See docs/reference/sql.md.
--
-- The same `attempt` counts once, so a retry after a lost reply is safe. The attempts are kept
-- until the latch opens: after that, another count changes nothing.
--
-- The call commits durably, because a count that was acknowledged is not repeated. With `opened`,
-- call wake_waiters() in its own transaction.
CREATE OR REPLACE FUNCTION count_down(
    name text,
    count integer,
    by integer DEFAULT 1,
    attempt uuid DEFAULT NULL,
    OUT remaining integer,
    OUT opened boolean
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := check_barrier('latch', name, count);
    seen record;
BEGIN
    IF (count_down.by >= 1) IS NOT TRUE THEN
        RAISE EXCEPTION 'Latch % is counted down by 1 or more; got %.',
            quote_literal(name), coalesce(count_down.by::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    ready := commit_durably();
    LOOP
        SELECT l.count, l.remaining INTO seen FROM latches AS l WHERE l.name = count_down.name FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO latches (name, count, remaining, used_at)
        VALUES (count_down.name, count_down.count, count_down.count, clock_timestamp())
        ON CONFLICT DO NOTHING;
    END LOOP;
    ready := check_same_size('latch', count_down.name, seen.count, count_down.count);
    remaining := seen.remaining;
    opened := false;
    IF remaining = 0 THEN
        RETURN;
    END IF;
    INSERT INTO latch_counts (name, attempt)
    VALUES (count_down.name, coalesce(count_down.attempt, gen_random_uuid()))
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    UPDATE latches AS l SET remaining = greatest(l.remaining - count_down.by, 0), used_at = clock_timestamp()
    WHERE l.name = count_down.name
    RETURNING l.remaining INTO remaining;
    opened := remaining = 0;
    IF opened THEN
        DELETE FROM latch_counts AS c WHERE c.name = count_down.name;
    END IF;
END
$$;
