-- Takes a lock from one exact grant, and notes who did it and why; false means that it is not held under this token.
--
-- A grant without durability is named by its number, which list_locks() has.
--
-- The holder must let go: its lease is not renewed any more, which it learns from its next renewal, and its deadline stays.
-- Nobody is granted the lock before it has let go or the deadline has passed, so this is as safe as a lease that runs out.
--
-- With `now` the lock is free at once, while its holder may still be at work and know nothing: only resources that
-- refuse a stale token are safe then. Call wake_queue() afterwards, in a transaction of its own, lest the first in line find
-- out by itself, within a second.
--
-- For the owner, and for whom `dblock grant --may force-release` allows it.
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
    FOR NO KEY UPDATE;
    -- The row is held before the clock is read, so that what ran out meanwhile is not taken from anybody.
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
        -- What the caller says of itself, and what is certain.
        format('%s as %s', left(coalesce(force_release.actor, describe_session()), 400), session_user),
        left(force_release.reason, 2048)
    );
    IF force_release.now THEN
        UPDATE distributed_locks AS l
        SET expires_at = '-infinity', released_at = clock_timestamp(), attempt = NULL, holder = NULL, meta = NULL
        WHERE l.name = force_release.name;
    ELSE
        UPDATE distributed_locks AS l SET forced_at = clock_timestamp() WHERE l.name = force_release.name;
    END IF;
    RETURN true;
END
$$;

-- Wakes the first in line of a lock that is free. Commits asynchronously, so let it stand alone.
CREATE OR REPLACE FUNCTION wake_queue(name text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
DECLARE
    ignored text;
BEGIN
    IF pg_current_xact_id_if_assigned() IS NULL THEN
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    PERFORM wake_if_free(wake_queue.name);
END
$$;
