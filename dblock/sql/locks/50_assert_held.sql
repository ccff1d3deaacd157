-- Proves a lease in the transaction that relies on it: true if this exact grant holds the lock now.
--
-- From then until the transaction ends, no other client is granted the lock, even if the lease
-- expires. The row keeps a KEY SHARE lock, which blocks a grant but not a renewal.
CREATE OR REPLACE FUNCTION assert_held(name text, token bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
BEGIN
    PERFORM 1 FROM distributed_locks AS l
    WHERE l.name = assert_held.name AND l.token = assert_held.token
    FOR KEY SHARE;
    IF FOUND AND EXISTS (
        SELECT FROM distributed_locks AS l
        WHERE l.name = assert_held.name AND l.token = assert_held.token AND l.expires_at > clock_timestamp()
    ) THEN
        RETURN true;
    END IF;
    ready := check_snapshot();
    RETURN false;
END
$$;
