-- Returns how much of a latch remains, and registers the attempt as a waiter unless the latch is
-- open. Call it again with the same `attempt` when a notification arrives on the client's channel.
-- The first call creates the latch. To give up the wait, call abandon() with the same attempt.
--
-- The latch's row is locked while the waiter is registered. So the call either sees the open latch,
-- or wake_waiters() after the opening sees the waiter.
CREATE OR REPLACE FUNCTION await_latch(
    name text,
    count integer,
    attempt uuid,
    client uuid,
    holder text DEFAULT NULL,
    presence uuid DEFAULT NULL,
    OUT remaining integer,
    OUT fresh boolean
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := check_barrier('latch', name, count);
    seen record;
BEGIN
    IF attempt IS NULL OR client IS NULL THEN
        RAISE EXCEPTION 'await_latch needs an attempt and a client to wait for latch %.', quote_literal(name)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    ready := check_request(await_latch.name, '1 s', await_latch.holder);
    -- A waiter that is lost, or a latch without a count, only costs another call.
    ready := commit_asynchronously();
    SELECT l.count, l.remaining INTO seen FROM latches AS l WHERE l.name = await_latch.name;
    IF NOT FOUND OR seen.remaining > 0 THEN
        LOOP
            SELECT l.count, l.remaining INTO seen FROM latches AS l WHERE l.name = await_latch.name FOR SHARE;
            EXIT WHEN FOUND;
            INSERT INTO latches (name, count, remaining, used_at)
            VALUES (await_latch.name, await_latch.count, await_latch.count, clock_timestamp())
            ON CONFLICT DO NOTHING;
        END LOOP;
    END IF;
    ready := check_same_size('latch', await_latch.name, seen.count, await_latch.count);
    remaining := seen.remaining;
    fresh := false;
    IF remaining = 0 THEN
        DELETE FROM barrier_waiters AS w WHERE w.attempt = await_latch.attempt AND w.kind = 'latch';
    ELSE
        fresh := register_waiter(
            'latch', await_latch.name, 0, await_latch.attempt, await_latch.client, await_latch.holder,
            await_latch.presence
        );
    END IF;
END
$$;
