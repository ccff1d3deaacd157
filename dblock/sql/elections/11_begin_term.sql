-- Begins a term for the candidate that was granted the lock `election:NAME` under this token and
-- attempt, and replies `lead`, `yield` or `lost`.
--
-- `yield`: a live candidate in the queue was named by transfer_term(), or has a higher rank. The
-- lock has been released, and the caller must queue again, behind that candidate. `lost`: the token
-- does not hold the lock. A caller that gets neither reply has not led.
--
-- A repeated call finds the term that it has begun. The newest ten thousand terms of each name are
-- kept.
CREATE OR REPLACE FUNCTION begin_term(
    name text, token bigint, attempt uuid DEFAULT NULL, value jsonb DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    kept CONSTANT bigint := 10000;
    alone CONSTANT boolean := pg_current_xact_id_if_assigned() IS NULL;
    lock_name CONSTANT text := election_lock(begin_term.name);
    ready boolean := check_election(begin_term.name, value => begin_term.value);
    candidate record;
    last record;
    next_holder text;
    next_number bigint;
    ignored text;
BEGIN
    -- No other client is granted the lock before this transaction ends.
    IF NOT assert_held(lock_name, begin_term.token) THEN
        RETURN 'lost';
    END IF;
    SELECT t.token, t.number, t.ended_at, t.transfer_to INTO last
    FROM terms AS t WHERE t.name = begin_term.name ORDER BY t.number DESC LIMIT 1;
    IF last.token = begin_term.token THEN
        -- The first call may have been interrupted before its commit was durable.
        ready := commit_durably();
        UPDATE terms AS t SET holder = t.holder
        WHERE t.name = begin_term.name AND t.token = begin_term.token AND t.ended_at IS NULL;
        RETURN CASE WHEN FOUND THEN 'lead' ELSE 'lost' END;
    END IF;
    SELECT l.holder, coalesce(c.rank, '{}') AS rank INTO candidate
    FROM distributed_locks AS l
    LEFT JOIN candidates AS c ON c.name = begin_term.name AND c.attempt = begin_term.attempt
    WHERE l.name = lock_name;
    IF last.transfer_to IS DISTINCT FROM candidate.holder OR last.transfer_to IS NULL THEN
        SELECT c.holder INTO next_holder FROM live_candidates(begin_term.name) AS c
        WHERE c.holder = last.transfer_to OR c.rank > candidate.rank
        LIMIT 1;
        IF FOUND THEN
            IF alone THEN
                -- The release must wake the next candidate, which only an asynchronous commit does.
                ignored := set_config('synchronous_commit', 'off', true);
            END IF;
            PERFORM release(lock_name, begin_term.token, durable => false);
            DELETE FROM candidates AS c WHERE c.name = begin_term.name AND c.attempt = begin_term.attempt;
            RETURN 'yield';
        END IF;
    END IF;
    ready := commit_durably();
    PERFORM end_terms_below(begin_term.name, begin_term.token);
    next_number := coalesce(last.number, 0) + 1;
    INSERT INTO terms (name, token, number, holder, rank, value, began_at)
    VALUES (
        begin_term.name, begin_term.token, next_number, candidate.holder, candidate.rank, begin_term.value,
        clock_timestamp()
    );
    DELETE FROM candidates AS c WHERE c.name = begin_term.name AND c.attempt = begin_term.attempt;
    DELETE FROM terms AS t WHERE t.name = begin_term.name AND t.number <= next_number - kept;
    RETURN 'lead';
END
$$;
