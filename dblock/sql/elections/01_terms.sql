-- Elections: what the functions in this folder share. No application role may call the
-- functions in this file.
--
-- A term is a grant of the lock `election:NAME` whose holder has called begin_term(), and a row in
-- the table `terms`. Three rules keep the table in order:
--
-- - begin_term() proves the grant, so the lock is not granted again before its transaction ends.
--   Beginnings are therefore committed in the order of their tokens.
-- - begin_term() also ends every earlier term that is still open. A term therefore ends before or
--   with the commit that begins the next one.
-- - Every function locks the lock's row first and a term's row second.

-- Returns the name of the lock of an election.
CREATE OR REPLACE FUNCTION election_lock(name text) RETURNS text
LANGUAGE sql IMMUTABLE
AS $$
    SELECT 'election:' || election_lock.name
$$;

-- Refuses a name, rank or value outside the documented limits.
CREATE OR REPLACE FUNCTION check_election(name text, rank bigint[] DEFAULT '{}', value jsonb DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    IF name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 503 THEN
        RAISE EXCEPTION 'The name of an election takes 1 to 503 bytes; this one has %.', coalesce(octet_length(name), 0)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF rank IS NULL OR cardinality(rank) > 16 OR array_ndims(rank) > 1 OR array_position(rank, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'The rank of a candidate of election % is a list of at most 16 numbers.', quote_literal(name)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(value::text) > 8192 THEN
        RAISE EXCEPTION 'The value of election % takes at most 8192 bytes of JSON; this one has %.',
            quote_literal(name), octet_length(value::text)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN true;
END
$$;

-- Returns the candidates that wait in the queue and are alive.
CREATE OR REPLACE FUNCTION live_candidates(name text)
RETURNS TABLE (number bigint, attempt uuid, holder text, rank bigint[], since timestamptz)
LANGUAGE sql VOLATILE
AS $$
    SELECT t.number, c.attempt, c.holder, c.rank, t.since
    FROM lock_tickets AS t
    JOIN candidates AS c ON c.name = live_candidates.name AND c.attempt = t.attempt
    JOIN lock_clients AS k ON k.client = t.client AND k.seen_until > clock_timestamp()
    WHERE t.name = election_lock(live_candidates.name)
      AND (t.presence IS NULL OR remaining_grace(t.presence, false, false) IS NULL)
    ORDER BY t.number
$$;

-- Ends the open terms of an election that have a lower token than `below`, and records how each
-- grant ended as far as the history of the lock tells. The caller has locked the lock's row, and
-- knows that those grants do not hold the lock any more.
CREATE OR REPLACE FUNCTION end_terms_below(name text, below bigint) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
BEGIN
    UPDATE terms AS t
    SET (ended_at, how) = (
        SELECT least(
                   coalesce(
                       CASE WHEN h.event <> 'forced' THEN h.at END,
                       CASE WHEN l.token = t.token THEN l.released_at ELSE l.granted_at END,
                       clock_timestamp()
                   ),
                   clock_timestamp()
               ),
               CASE h.event WHEN 'forced_now' THEN 'forced' ELSE coalesce(h.event, 'released') END
        FROM (SELECT) AS one
        LEFT JOIN distributed_locks AS l ON l.name = election_lock(t.name)
        LEFT JOIN LATERAL (
            SELECT o.event, o.at FROM lock_history AS o
            WHERE o.name = election_lock(t.name) AND o.token = t.token
              AND o.event IN ('expired', 'died', 'forced', 'forced_now')
            ORDER BY o.number DESC LIMIT 1
        ) AS h ON true
    )
    WHERE t.name = end_terms_below.name AND t.token < end_terms_below.below AND t.ended_at IS NULL;
END
$$;

-- Records the end of an open term whose leader does not hold the lock any more: its lease has
-- expired, its process has died, or it released the lock without end_term(). Any reader may cause
-- this, so a vacancy is recorded although no candidate is left.
--
-- Returns the seconds of grace that a leader has left whose presence is gone: ask again after that.
-- NULL means that there is nothing to wait for. If another transaction has locked the lock's row,
-- nothing is recorded, and a later call finds the end.
CREATE OR REPLACE FUNCTION record_ended_term(name text) RETURNS double precision
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    lock_name CONSTANT text := election_lock(record_ended_term.name);
    open_token bigint;
    seen record;
    grace double precision;
BEGIN
    SELECT t.token INTO open_token FROM terms AS t
    WHERE t.name = record_ended_term.name AND t.ended_at IS NULL
    ORDER BY t.token DESC LIMIT 1;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    SELECT l.token, l.expires_at, l.presence INTO seen FROM distributed_locks AS l WHERE l.name = lock_name;
    IF seen.token = open_token AND seen.expires_at > clock_timestamp() THEN
        IF seen.presence IS NULL THEN
            RETURN NULL;
        END IF;
        grace := remaining_grace(seen.presence, true, true);
        IF grace IS NULL OR grace > 0 THEN
            RETURN grace;
        END IF;
        IF NOT free_dead_holder(lock_name, open_token, seen.presence) THEN
            RETURN NULL;
        END IF;
        PERFORM end_terms_below(record_ended_term.name, open_token + 1);
        PERFORM wake_if_free(lock_name);
        RETURN NULL;
    END IF;
    -- With the row locked, no renewal of this grant can be under way. A row that was deleted or
    -- granted again cannot become this grant's again.
    IF seen.token = open_token THEN
        IF NOT lock_row_briefly(lock_name) THEN
            RETURN NULL;
        END IF;
        SELECT l.token, l.expires_at, l.holder INTO seen FROM distributed_locks AS l WHERE l.name = lock_name;
        IF seen.token = open_token AND seen.expires_at > clock_timestamp() THEN
            RETURN NULL;
        END IF;
        IF seen.token = open_token AND seen.expires_at > '-infinity' THEN
            UPDATE terms AS t SET ended_at = least(seen.expires_at, clock_timestamp()), how = 'expired'
            WHERE t.name = record_ended_term.name AND t.token = open_token AND t.ended_at IS NULL;
            RETURN NULL;
        END IF;
    END IF;
    -- The next leader may be recording this end at the moment. A reader does not wait for that.
    PERFORM 1 FROM terms AS t
    WHERE t.name = record_ended_term.name AND t.token = open_token AND t.ended_at IS NULL
    FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND THEN
        PERFORM end_terms_below(record_ended_term.name, open_token + 1);
    END IF;
    RETURN NULL;
END
$$;
