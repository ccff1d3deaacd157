-- Marks this transaction as working under a lease, so that look_for_deadlock() follows its waits
-- for rows and other locks of Postgres. False means that this grant does not hold the lock. It
-- proves nothing: the lock may be granted to another client before the transaction ends.
-- assert_held() proves the lease, and marks the transaction in the same way.
CREATE OR REPLACE FUNCTION bind_transaction(name text, token bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
BEGIN
    IF EXISTS (
        SELECT FROM distributed_locks AS l
        WHERE l.name = bind_transaction.name AND l.token = bind_transaction.token
          AND l.expires_at > clock_timestamp()
    ) THEN
        ready := pg_try_advisory_xact_lock_shared(token_key(bind_transaction.token));
        RETURN true;
    END IF;
    ready := check_snapshot();
    RETURN false;
END
$$;
