-- Gives up the locks that an attempt of acquire_all() holds, and its ticket, so that a waiter for
-- the first of these names can go on: both wait in a cycle. The attempt gets a ticket for that lock
-- right behind the waiter, and the function returns its number.
--
-- The waiter passes the waiters before it that take their locks in order, because these would need
-- the same locks and block it again. They move back by two positions, the waiters behind it by one.
-- A waiter whose number has changed finds that out when it redeems its ticket, and calls acquire().
--
-- NULL means that the locks are given up, but without a new ticket: another transaction keeps the
-- lock or its queue locked, or the attempt does not hold the lock any more.
CREATE OR REPLACE FUNCTION give_way(
    names text[],
    attempt uuid,
    waiter uuid,
    client uuid,
    presence uuid DEFAULT NULL,
    holder text DEFAULT NULL,
    ordered boolean DEFAULT false
) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_asynchronously();
    at text := give_way.names[1];
    numbers bigint[];
    attempts uuid[];
    own bigint;
BEGIN
    IF NOT (lock_row_briefly(at) AND lock_queue(at, 20)) OR NOT EXISTS (
        SELECT FROM distributed_locks AS l
        WHERE l.name = at AND l.attempt = give_way.attempt AND l.expires_at > clock_timestamp()
    ) OR NOT EXISTS (
        SELECT FROM lock_tickets AS t WHERE t.name = at AND t.attempt = give_way.waiter
    ) THEN
        PERFORM abandon_all(give_way.names, give_way.attempt);
        RETURN NULL;
    END IF;
    PERFORM free_lock(at);
    WITH joined AS (
        UPDATE lock_queues AS q SET last_ticket = q.last_ticket + 1 WHERE q.name = at RETURNING q.last_ticket
    )
    INSERT INTO lock_tickets (name, number, attempt, client, presence, holder, since, ordered)
    SELECT at, j.last_ticket, give_way.attempt, give_way.client, give_way.presence,
           coalesce(give_way.holder, describe_session()), clock_timestamp(), coalesce(give_way.ordered, false)
    FROM joined AS j
    ON CONFLICT ON CONSTRAINT lock_tickets_attempt_key DO NOTHING;
    PERFORM touch_client(give_way.client);
    SELECT array_agg(t.number ORDER BY t.number),
           array_agg(t.attempt ORDER BY CASE
               WHEN t.attempt = give_way.waiter THEN 2
               WHEN t.attempt = give_way.attempt THEN 3
               WHEN t.number > w.number THEN 5
               WHEN t.ordered THEN 4
               ELSE 1
           END, t.number)
    INTO numbers, attempts
    FROM lock_tickets AS t, lock_tickets AS w
    WHERE t.name = at AND w.name = at AND w.attempt = give_way.waiter;
    -- A number is unique at every step, so each ticket first takes a number that no other has.
    UPDATE lock_tickets AS t SET number = -t.number WHERE t.name = at;
    UPDATE lock_tickets AS t SET number = o.number
    FROM unnest(numbers, attempts) AS o (number, attempt)
    WHERE t.name = at AND t.attempt = o.attempt;
    SELECT t.number INTO own FROM lock_tickets AS t WHERE t.name = at AND t.attempt = give_way.attempt;
    PERFORM wake_if_free(at);
    PERFORM abandon_all(give_way.names[2:], give_way.attempt);
    RETURN own;
END
$$;
