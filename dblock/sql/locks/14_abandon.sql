-- Gives back the grant and the ticket of an attempt whose caller left before the reply arrived or
-- the wait was over, and wakes the next waiter. In its own transaction it commits asynchronously,
-- like release(). False means that there was nothing to give back. With `only_ticket` a grant
-- stays. An attempt that waits at a barrier or a latch leaves it.
--
-- A grant whose transaction is still open cannot be seen. If that transaction takes longer than
-- 20 ms, the reply is false, and a grant that is committed later lasts until its deadline. So end
-- the call that asked for the lock before you abandon its attempt.
CREATE OR REPLACE FUNCTION abandon(name text, attempt uuid, only_ticket boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    gave_back boolean;
    row_locked boolean;
    held text;
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
    DELETE FROM barrier_waiters AS w WHERE w.attempt = abandon.attempt;
    gave_back := gave_back OR FOUND;
    IF NOT only_ticket THEN
        FOR held IN
            SELECT l.name FROM distributed_locks AS l
            -- The lock, or a share of it.
            WHERE (l.name = abandon.name OR l.head = abandon.name)
              AND l.attempt = abandon.attempt AND l.expires_at > clock_timestamp()
        LOOP
            PERFORM 1 FROM distributed_locks AS l
            WHERE l.name = held AND l.attempt = abandon.attempt AND l.expires_at > clock_timestamp()
            FOR NO KEY UPDATE;
            IF FOUND THEN
                PERFORM free_lock(held);
                row_locked := true;
                gave_back := true;
            END IF;
        END LOOP;
    END IF;
    IF gave_back AND row_locked THEN
        PERFORM wake_if_free(abandon.name);
    END IF;
    ignored := set_config('lock_timeout', patience, true);
    RETURN gave_back;
END
$$;
