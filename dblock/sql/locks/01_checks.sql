-- Checks that the public functions share. No application role may call the functions in files
-- below 10. Each of them runs under the fixed search_path of the public function that calls it.
--
-- Some return true instead of nothing. A caller can then call them in an assignment, which PL/pgSQL
-- evaluates without the cost of a query.

-- Refuses arguments outside the documented limits. The message names the argument and the lock.
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
    -- Compare seconds: an interval of one year compares as 360 days, but lasts 365.25.
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

-- Refuses to return false from a snapshot that may be out of date. Under REPEATABLE READ or
-- SERIALIZABLE a transaction does not see renewals that are newer than its snapshot. A retry in a
-- new transaction does.
CREATE OR REPLACE FUNCTION check_snapshot() RETURNS boolean
LANGUAGE plpgsql STABLE
AS $$
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
        AND statement_timestamp() > transaction_timestamp()
    THEN
        RAISE EXCEPTION 'This transaction cannot see whether the lease is held: it may have been renewed since.'
            USING ERRCODE = 'serialization_failure', HINT = 'Retry the transaction.';
    END IF;
    RETURN true;
END
$$;

-- Returns whether each statement of this transaction sees what other transactions have committed
-- before it. Under REPEATABLE READ and SERIALIZABLE it does not. A function then relies only on
-- rows that it has locked: if such a row has changed since the snapshot, Postgres raises a
-- serialization failure.
CREATE OR REPLACE FUNCTION sees_latest_commits() RETURNS boolean
LANGUAGE sql STABLE
AS $$
    SELECT current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
$$;

-- Returns whether the snapshot of the current statement is less than a second old. A client sends a
-- heartbeat every second that counts for three. So a snapshot of that age does not hide that a
-- client is alive.
CREATE OR REPLACE FUNCTION snapshot_is_fresh() RETURNS boolean
LANGUAGE sql STABLE
AS $$
    SELECT current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
        OR pg_catalog.clock_timestamp() < transaction_timestamp() + interval '1 second'
$$;

-- Names the calling session, for callers that gave no holder or actor.
CREATE OR REPLACE FUNCTION describe_session() RETURNS text
LANGUAGE sql STABLE
AS $$
    SELECT format('%s@%s backend %s', session_user, coalesce(host(inet_client_addr()), 'local'), pg_backend_pid())
$$;
