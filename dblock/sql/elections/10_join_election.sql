-- Registers a candidate before it waits for the lock `election:NAME` under the same `attempt`. Of
-- the candidates that wait, one with the highest `rank` leads next. Ranks are compared number by
-- number.
CREATE OR REPLACE FUNCTION join_election(name text, attempt uuid, holder text, rank bigint[] DEFAULT '{}')
RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := check_election(join_election.name, join_election.rank) AND commit_asynchronously();
BEGIN
    IF join_election.attempt IS NULL OR (octet_length(join_election.holder) <= 512) IS NOT TRUE THEN
        RAISE EXCEPTION 'A candidate of election % needs an attempt and a holder of at most 512 bytes.',
            quote_literal(join_election.name)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- Candidates that died without leave_election().
    DELETE FROM candidates AS c
    WHERE c.name = join_election.name AND c.since < clock_timestamp() - interval '1 day'
      AND NOT EXISTS (
          SELECT FROM lock_tickets AS t WHERE t.attempt = c.attempt AND t.name = election_lock(c.name)
      );
    INSERT INTO candidates AS c (name, attempt, holder, rank, since)
    VALUES (
        join_election.name, join_election.attempt, join_election.holder, join_election.rank, clock_timestamp()
    )
    ON CONFLICT ON CONSTRAINT candidates_pkey DO UPDATE SET rank = excluded.rank, holder = excluded.holder;
END
$$;

-- Removes a candidate that does not wait any more. Its ticket is given up by abandon().
CREATE OR REPLACE FUNCTION leave_election(name text, attempt uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_asynchronously();
BEGIN
    DELETE FROM candidates AS c WHERE c.name = leave_election.name AND c.attempt = leave_election.attempt;
    RETURN FOUND;
END
$$;
