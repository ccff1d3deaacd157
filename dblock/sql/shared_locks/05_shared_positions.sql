-- Returns the tickets of a client for a shared lock that can be granted now or are next, for
-- heartbeat(). `next_check` is the seconds until something may change (0: the ticket can be granted
-- now, if no open transaction has proved an expired lease), and `watched` whether a holder that is
-- in the way has a presence. Of the readers that a writer keeps out, only the first is returned:
-- the others of this client have to wait for the same. Locks no row.
CREATE OR REPLACE FUNCTION look_at_shared_queue(name text, client uuid)
RETURNS TABLE (attempt uuid, next_check double precision, watched boolean)
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    head record;
    shares record;
    writer record;
    next record;
    free integer;
BEGIN
    SELECT l.kind, l.permits INTO head FROM distributed_locks AS l WHERE l.name = look_at_shared_queue.name;
    IF NOT EXISTS (
        SELECT FROM lock_tickets AS t
        WHERE t.name = look_at_shared_queue.name AND t.client = look_at_shared_queue.client
    ) THEN
        RETURN;
    END IF;
    IF head.kind = 'semaphore' THEN
        shares := look_at_shares(look_at_shared_queue.name, '{permit}', true, false);
        free := greatest(head.permits - shares.held, 0);
        FOR next IN
            SELECT t.attempt, t.client, row_number() OVER (ORDER BY t.number) AS place
            FROM live_tickets(look_at_shared_queue.name, free + 1, NULL, NULL, false) AS t
        LOOP
            CONTINUE WHEN next.client <> look_at_shared_queue.client;
            attempt := next.attempt;
            next_check := CASE WHEN next.place <= free THEN 0 ELSE shares.next_check END;
            watched := next.place > free AND shares.watched;
            RETURN NEXT;
        END LOOP;
        RETURN;
    END IF;
    SELECT t.number, t.attempt, t.client INTO writer
    FROM live_tickets(look_at_shared_queue.name, 1, 'write', NULL, false) AS t;
    IF writer.client = look_at_shared_queue.client AND writer.number = (
        SELECT t.number FROM live_tickets(look_at_shared_queue.name, 1, NULL, NULL, false) AS t
    ) THEN
        shares := look_at_shares(look_at_shared_queue.name, '{reader,writer}', true, false);
        attempt := writer.attempt;
        next_check := shares.next_check;
        watched := shares.watched;
        RETURN NEXT;
        RETURN;
    END IF;
    shares := look_at_shares(look_at_shared_queue.name, '{writer}', true, false);
    RETURN QUERY
        SELECT t.attempt, shares.next_check, shares.watched
        FROM lock_tickets AS t
        WHERE t.name = look_at_shared_queue.name AND t.client = look_at_shared_queue.client AND t.mode = 'read'
          AND t.number < coalesce(writer.number, 9223372036854775807)
        ORDER BY t.number
        LIMIT CASE WHEN shares.next_check > 0 THEN 1 END;
END
$$;
