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
    row_locked boolean;
    patience text := current_setting('lock_timeout');
    ignored text;
    ready boolean;
BEGIN
    -- Wait only briefly, because the client can retry.
    ignored := set_config('lock_timeout', '500ms', true);
    ready := commit_asynchronously();
    -- With the row locked, a release either has finished, and wake_if_free() sees the free lock, or
    -- comes later and does not see this ticket. If another transaction keeps the row locked, no
    -- waiter is woken: the next one finds out by itself.
    row_locked := lock_row_briefly(abandon.name);
    DELETE FROM lock_tickets AS t WHERE t.attempt = abandon.attempt AND t.name = abandon.name;
    gave_back := FOUND;
    IF NOT only_ticket AND EXISTS (
        SELECT FROM distributed_locks AS l
        WHERE l.name = abandon.name AND l.attempt = abandon.attempt AND l.expires_at > clock_timestamp()
    ) THEN
        PERFORM 1 FROM distributed_locks AS l
        WHERE l.name = abandon.name AND l.attempt = abandon.attempt AND l.expires_at > clock_timestamp()
        FOR NO KEY UPDATE;
        IF FOUND THEN
            PERFORM free_lock(abandon.name);
            row_locked := true;
            gave_back := true;
        END IF;
    END IF;
    IF gave_back AND row_locked THEN
        PERFORM wake_if_free(abandon.name);
    END IF;
    ignored := set_config('lock_timeout', patience, true);
    RETURN gave_back;
END
$$;
