-- Extends the lease only for this exact token; no row means that it is lost.
--
-- The row is held before the clock is read, so that a renewal which had to wait cannot
-- revive a lease that ran out meanwhile. A renewal commits durably like the grant it
-- extends: were it forgotten in a crash, the lock could be granted anew while the holder trusts it.
--
-- A holder that was told to let go (force_release) is not renewed any more, and keeps its deadline.
--
-- It never brings the deadline nearer, so that two renewals under way at once may arrive in any order: whoever was told
-- of a deadline can rely on it. Only when the server's clock was set back does the deadline come back with it,
-- to as far ahead as it was ever asked to be.
CREATE OR REPLACE FUNCTION renew(name text, token bigint, ttl interval DEFAULT '30 seconds')
RETURNS TABLE (expires_at timestamptz, remaining double precision)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
    lasting interval;
BEGIN
    ready := check_request(renew.name, renew.ttl) AND commit_durably();
    lasting := make_interval(secs => date_part('epoch', renew.ttl));
    PERFORM 1 FROM distributed_locks AS l
    WHERE l.name = renew.name AND l.token = renew.token
    FOR NO KEY UPDATE;
    IF FOUND THEN
        RETURN QUERY
            UPDATE distributed_locks AS l
            SET expires_at = greatest(least(l.expires_at, clock_timestamp() + l.ttl), clock_timestamp() + lasting),
                ttl = greatest(l.ttl, lasting)
            WHERE l.name = renew.name AND l.token = renew.token AND l.expires_at > clock_timestamp()
              AND l.forced_at IS NULL
            RETURNING l.expires_at, date_part('epoch', lasting);
    END IF;
END
$$;
