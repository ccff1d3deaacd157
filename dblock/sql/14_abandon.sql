-- Gives back the grant and the ticket of an attempt whose caller left before the reply arrived or
-- the wait was over, and wakes the next waiter. In its own transaction it commits asynchronously,
-- like release(). False means that there was nothing to give back. With `only_ticket` a grant
-- stays.
CREATE OR REPLACE FUNCTION abandon(name text, attempt uuid, only_ticket boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    gave_back boolean;
    queued boolean;
    patience text := current_setting('lock_timeout');
    ignored text;
    ready boolean;
BEGIN
    -- Wait only briefly, because the client can retry.
    ignored := set_config('lock_timeout', '500ms', true);
    ready := commit_asynchronously();
    PERFORM 1 FROM distributed_locks AS l
    WHERE l.name = abandon.name AND l.attempt = abandon.attempt AND l.expires_at > clock_timestamp()
      AND NOT only_ticket
    FOR NO KEY UPDATE;
    gave_back := FOUND;
    IF gave_back THEN
        queued := free_lock(abandon.name);
    END IF;
    IF queued OR EXISTS (SELECT FROM lock_tickets AS t WHERE t.attempt = abandon.attempt AND t.name = abandon.name) THEN
        -- Under the queue lock, so that a transaction that frees the lock either sees this ticket
        -- or has finished, and wake_if_free() sees the free lock.
        PERFORM lock_queue(abandon.name, true);
        DELETE FROM lock_tickets AS t WHERE t.attempt = abandon.attempt AND t.name = abandon.name;
        gave_back := true;
        PERFORM wake_if_free(abandon.name);
    END IF;
    ignored := set_config('lock_timeout', patience, true);
    RETURN gave_back;
END
$$;
