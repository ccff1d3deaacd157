-- Notifies the clients whose wait at a barrier or a latch is over, and returns how many waiters it
-- notified. Call it in its own transaction, after a trip or the opening of a latch: a durable
-- commit must not notify (see wake_next). A waiter that is not notified finds out by itself.
CREATE OR REPLACE FUNCTION wake_waiters(kind text, name text) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_asynchronously();
    woken integer := 0;
    waiter record;
BEGIN
    IF current_setting('synchronous_commit') <> 'off' THEN
        RETURN 0;
    END IF;
    -- Not in the WHERE, where the planner might notify before it looks whether the wait is over.
    FOR waiter IN
        SELECT w.client, w.attempt
        FROM barrier_waiters AS w
        WHERE w.kind = wake_waiters.kind AND w.name = wake_waiters.name
          AND (w.over OR EXISTS (
              SELECT FROM latches AS l WHERE w.kind = 'latch' AND l.name = w.name AND l.remaining = 0
          ))
    LOOP
        woken := woken + notify_waiter(waiter.client, waiter.attempt)::integer;
    END LOOP;
    RETURN woken;
END
$$;
