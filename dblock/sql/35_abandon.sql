-- Gives back whatever this attempt was granted, and its place in line, for a caller who left before the answer came or the
-- wait was over. The lock goes straight to the next in line. Like a release that stands alone it commits asynchronously.
-- False means that there was nothing to give back. With `only_ticket` a grant stays as it is.
CREATE OR REPLACE FUNCTION abandon(name text, attempt uuid, only_ticket boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    gave_back boolean;
    others boolean;
    patience text := current_setting('lock_timeout');
    ignored text;
BEGIN
    -- Not for long: it can be tried again.
    ignored := set_config('lock_timeout', '500ms', true);
    IF pg_current_xact_id_if_assigned() IS NULL THEN
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    UPDATE distributed_locks AS l
    SET expires_at = '-infinity', released_at = clock_timestamp(), attempt = NULL, holder = NULL, meta = NULL
    WHERE l.name = abandon.name AND l.attempt = abandon.attempt AND l.expires_at > clock_timestamp()
      AND NOT only_ticket
    RETURNING l.waiting INTO others;
    gave_back := FOUND;
    IF others OR EXISTS (SELECT FROM lock_tickets AS t WHERE t.attempt = abandon.attempt AND t.name = abandon.name) THEN
        -- With the line held, so that whoever frees the lock meanwhile finds us, or comes before us and is seen below.
        PERFORM lock_queue(abandon.name, true);
        DELETE FROM lock_tickets AS t WHERE t.attempt = abandon.attempt AND t.name = abandon.name;
        gave_back := true;
        PERFORM wake_if_free(abandon.name);
    END IF;
    ignored := set_config('lock_timeout', patience, true);
    RETURN gave_back;
END
$$;
