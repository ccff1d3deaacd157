-- What the public functions share. None of these is granted to an application's role, and each runs under
-- the fixed search_path of the function that calls it. The first two return true, so that they can be called in
-- an assignment, which PL/pgSQL evaluates without the cost of a query.

-- Refuses a request outside the documented limits, naming what was wrong with which lock.
CREATE OR REPLACE FUNCTION check_request(
    name text, ttl interval, holder text DEFAULT NULL, meta jsonb DEFAULT NULL
) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    IF name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 512 THEN
        RAISE EXCEPTION 'A lock''s name takes 1 to 512 bytes; this one has %.', coalesce(octet_length(name), 0)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- In seconds, as it will count: an interval compares a year as 360 days, and lasts for 365.25.
    IF (date_part('epoch', ttl) BETWEEN 0.1 AND 86400) IS NOT TRUE THEN
        RAISE EXCEPTION 'The ttl of lock % is %; it must lie between 100 ms and 24 h.', quote_literal(name), ttl
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(holder) > 512 THEN
        RAISE EXCEPTION 'The holder of lock % takes at most 512 bytes; this one has %.',
            quote_literal(name), octet_length(holder)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(meta::text) > 8192 THEN
        RAISE EXCEPTION 'The meta of lock % takes at most 8192 bytes of JSON; this one has %.',
            quote_literal(name), octet_length(meta::text)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN true;
END
$$;

-- Makes this transaction's commit wait for the disk, whatever the server's, database's or role's default.
-- A stricter setting than `on` is left alone.
CREATE OR REPLACE FUNCTION commit_durably() RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    RETURN true;
END
$$;

-- Refuses to say no on the ground of what a transaction saw when it began, under an isolation that shows it nothing
-- newer: the lease may have been renewed since. Another try, in a new transaction, can tell.
CREATE OR REPLACE FUNCTION check_snapshot() RETURNS boolean
LANGUAGE plpgsql STABLE
AS $$
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
        AND statement_timestamp() > transaction_timestamp()
    THEN
        RAISE EXCEPTION 'Whether the lease is held cannot be seen in a transaction that began before it was last renewed.'
            USING ERRCODE = 'serialization_failure', HINT = 'Try the transaction again.';
    END IF;
    RETURN true;
END
$$;

-- Names the calling session, for callers who did not say who they are.
CREATE OR REPLACE FUNCTION describe_session() RETURNS text
LANGUAGE sql STABLE
AS $$
    SELECT format('%s@%s backend %s', session_user, coalesce(host(inet_client_addr()), 'local'), pg_backend_pid())
$$;

-- Tells the server's timeline. The name of a WAL file begins with it; any role may ask, and it is right from the moment of
-- a promotion.
CREATE OR REPLACE FUNCTION current_timeline() RETURNS bigint
LANGUAGE sql VOLATILE
AS $$
    SELECT ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint
$$;

-- Takes the tokens far ahead, once, on a timeline other than the one they were last minted on.
--
-- A promotion or a point-in-time recovery may have lost tokens that a resource has already seen: the sequence went back,
-- and by itself would hand them out again. Every such event changes the timeline (and so does pg_upgrade, back to 1). Whoever
-- would mint on a timeline that is not the recorded one comes here first; all others wait for it at the record.
CREATE OR REPLACE FUNCTION enter_timeline() RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    recorded bigint;
BEGIN
    SELECT timeline INTO STRICT recorded FROM token_timeline FOR UPDATE;
    IF recorded <> current_timeline() THEN
        -- Nobody mints meanwhile, so the sequence stands still.
        -- Above the range of every timeline before this one too: a recovery may go back past an earlier jump.
        PERFORM pg_catalog.setval(
            'token_sequence'::pg_catalog.regclass,
            greatest(last_value + (1::bigint << 40), (current_timeline() - 1) << 40)
        ) FROM token_sequence;
        UPDATE token_timeline SET timeline = current_timeline();
    END IF;
END
$$;
