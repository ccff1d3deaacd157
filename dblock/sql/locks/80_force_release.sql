-- Takes a lock from one exact grant, and records the actor and the reason. False means that the
-- lock is not held under this token. A grant that is not durable is identified by its negative
-- number, which list_locks() returns.
--
-- The holder must release: its lease is not renewed any more, which it learns from its next
-- renewal, and its deadline stays. No other client is granted the lock before the holder has
-- released it or the deadline has passed. So this is as safe as a lease that expires.
--
-- With `now` the lock is free at once, while its holder may still be working without knowing. Only
-- resources that refuse a stale token are safe then. Call wake_queue() afterwards in its own
-- transaction. Otherwise the first waiter finds out by itself, within a second.
--
-- For the owner, and for roles that `dblock grant --may force-release` allows.
CREATE OR REPLACE FUNCTION force_release(
    name text, token bigint, actor text DEFAULT NULL, reason text DEFAULT NULL, now boolean DEFAULT false
) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_durably();
    held record;
BEGIN
    SELECT l.token, l.holder INTO held FROM distributed_locks AS l
    WHERE l.name = force_release.name
      AND l.token = force_release.token
      AND l.expires_at > '-infinity'
    FOR NO KEY UPDATE;
    -- The row is locked before the clock is read, so an expired lease is not reported as forced.
    IF NOT FOUND OR NOT EXISTS (
        SELECT FROM distributed_locks AS l
        WHERE l.name = force_release.name AND l.token = held.token AND l.expires_at > clock_timestamp()
    ) THEN
        ready := check_snapshot();
        RETURN false;
    END IF;
    PERFORM record_event(
        force_release.name, held.token, CASE WHEN force_release.now THEN 'forced_now' ELSE 'forced' END, held.holder,
        clock_timestamp(),
        -- The name that the caller gives, and the role that is certain.
        format('%s as %s', left(coalesce(force_release.actor, describe_session()), 400), session_user),
        left(force_release.reason, 2048)
    );
    IF force_release.now THEN
        PERFORM free_lock(force_release.name);
    ELSE
        UPDATE distributed_locks AS l SET forced_at = clock_timestamp() WHERE l.name = force_release.name;
    END IF;
    RETURN true;
END
$$;
