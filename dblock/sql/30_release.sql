-- Frees the lock only if this exact grant still holds it; false means that it does not: it ran out, the lock was granted
-- to another, or was released before. The first who waits in line, and nobody else, is woken.
--
-- With `durable => false` the transaction commits asynchronously: losing the release in a crash only
-- keeps the lock until its deadline. The setting is the whole transaction's, so it is left alone where something was
-- written before; what is written afterwards it covers too, so let a release stand alone, or come last.
CREATE OR REPLACE FUNCTION release(name text, token bigint, durable boolean DEFAULT true)
RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ignored text;
    ready boolean;
    others boolean;
BEGIN
    IF NOT release.durable AND pg_current_xact_id_if_assigned() IS NULL THEN
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    UPDATE distributed_locks AS l
    SET expires_at = '-infinity', released_at = clock_timestamp(), attempt = NULL, holder = NULL, meta = NULL
    WHERE l.name = release.name AND l.token = release.token AND l.expires_at > clock_timestamp()
    RETURNING l.waiting INTO others;
    IF FOUND THEN
        IF others THEN
            ready := wake_next(release.name);
        END IF;
        RETURN true;
    END IF;
    ready := check_snapshot();
    RETURN false;
END
$$;
