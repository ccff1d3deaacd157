-- Extends the lease only for this exact token. No row means that the lease is lost.
--
-- The row is locked before the clock is read, so a renewal that had to wait cannot revive a lease
-- that expired in the meantime. A renewal commits durably like the grant that it extends. If a
-- crash lost it, the lock could be granted again while the holder still trusts its lease.
--
-- A released lease is not locked, so a late renewal never makes the free lock look busy.
--
-- A holder that was told to release (force_release) is not renewed any more, and keeps its
-- deadline.
--
-- A renewal never brings the deadline nearer, so two concurrent renewals may arrive in any order,
-- and a holder can rely on every deadline that it received. Only if the server's clock was set back
-- does the deadline move back with it, to no further ahead than the longest ttl that was asked for.
CREATE OR REPLACE FUNCTION renew(name text, token bigint, ttl interval DEFAULT '30 seconds')
RETURNS TABLE (expires_at timestamptz, remaining double precision)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
    lease_time interval;
BEGIN
    ready := check_request(renew.name, renew.ttl) AND commit_durably();
    lease_time := make_interval(secs => date_part('epoch', renew.ttl));
    PERFORM 1 FROM distributed_locks AS l
    WHERE l.name = renew.name AND l.token = renew.token AND l.expires_at > '-infinity'
    FOR NO KEY UPDATE;
    IF FOUND THEN
        RETURN QUERY
            UPDATE distributed_locks AS l
            SET expires_at = greatest(least(l.expires_at, clock_timestamp() + l.ttl), clock_timestamp() + lease_time),
                ttl = greatest(l.ttl, lease_time)
            WHERE l.name = renew.name AND l.token = renew.token AND l.expires_at > clock_timestamp()
              AND l.forced_at IS NULL
            RETURNING l.expires_at, date_part('epoch', lease_time);
    END IF;
END
$$;
