-- Deletes the tickets of a client and wakes the waiters behind them. Without `keep` it deletes all
-- tickets, the client's heartbeat and the presence. With `keep` it deletes only tickets whose
-- attempts are not named there, and leaves the presence. Locks that the client holds stay held. Its
-- waiters at barriers and latches leave in the same way.
CREATE OR REPLACE FUNCTION leave_queue(client uuid, presence uuid DEFAULT NULL, keep uuid[] DEFAULT '{}') RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    one text;
    row_locked boolean;
    patience text := current_setting('lock_timeout');
    ignored text;
    ready boolean;
BEGIN
    -- A ticket that is being redeemed is locked until that grant is on disk.
    ignored := set_config('lock_timeout', '500ms', true);
    ready := commit_asynchronously();
    FOR one IN SELECT DISTINCT t.name FROM lock_tickets AS t WHERE t.client = leave_queue.client ORDER BY t.name LOOP
        -- As in abandon().
        row_locked := lock_row_briefly(one);
        DELETE FROM lock_tickets AS t
        WHERE t.client = leave_queue.client AND t.name = one AND t.attempt <> ALL (leave_queue.keep)
          -- A ticket that was issued after the client sent this call could not be named in it.
          AND (leave_queue.keep = '{}' OR t.since < clock_timestamp() - interval '3 seconds');
        IF FOUND AND row_locked THEN
            PERFORM wake_if_free(one);
        END IF;
    END LOOP;
    DELETE FROM barrier_waiters AS w
    WHERE w.client = leave_queue.client AND w.attempt <> ALL (leave_queue.keep)
      AND (leave_queue.keep = '{}' OR w.since < clock_timestamp() - interval '3 seconds');
    IF leave_queue.keep = '{}' THEN
        DELETE FROM lock_clients AS c WHERE c.client = leave_queue.client;
        DELETE FROM lock_presence AS p WHERE p.presence = leave_queue.presence;
    END IF;
    ignored := set_config('lock_timeout', patience, true);
END
$$;
