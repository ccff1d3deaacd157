-- Proves a lease in the transaction that relies on it: true if this exact grant holds the lock now.
--
-- From then until the transaction ends, no other client is granted the lock, even if the lease
-- expires. The row keeps a KEY SHARE lock, which blocks a grant but not a renewal. A shared
-- advisory lock marks the transaction for look_for_deadlock(), see 08_bound_sessions.sql.
CREATE OR REPLACE FUNCTION assert_held(name text, token bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
BEGIN
    PERFORM 1 FROM distributed_locks AS l
    WHERE l.name = assert_held.name AND l.token = assert_held.token
      -- Not the head of a shared lock, which no transaction may keep locked.
      AND l.expires_at > '-infinity'
    FOR KEY SHARE;
    IF FOUND AND EXISTS (
        SELECT FROM distributed_locks AS l
        WHERE l.name = assert_held.name AND l.token = assert_held.token AND l.expires_at > clock_timestamp()
    ) THEN
        ready := pg_try_advisory_xact_lock_shared(token_key(assert_held.token));
        RETURN true;
    END IF;
    ready := check_snapshot();
    RETURN false;
END
$$;
