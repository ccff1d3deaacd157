-- Returns every wait: of a client for the holder of a lock, and of a session that works under a
-- token for the sessions that block it. `seconds` is how long a client has waited. `cycle` numbers
-- the deadlocks: all waits of one deadlock have the same number. It is NULL for other waits.
--
-- A deadlock is found here only after its waiters have called look_for_deadlock(), because nothing
-- else tells which tokens a waiter holds.
CREATE OR REPLACE FUNCTION wait_graph(max_rows integer DEFAULT 1000)
RETURNS TABLE (
    waiter text,
    lock text,
    holder text,
    token bigint,
    seconds double precision,
    session integer,
    blocker integer,
    cycle integer
)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ticket record;
    -- The waits of all deadlocks: the attempt of a ticket, or the two sessions.
    waits jsonb := '{}';
    number integer := 0;
    members jsonb;
BEGIN
    FOR ticket IN
        SELECT DISTINCT w.attempt, w.name FROM waiting_holds AS w
        JOIN lock_tickets AS t ON t.attempt = w.attempt AND t.name = w.name
        ORDER BY w.attempt
        LIMIT wait_graph.max_rows
    LOOP
        CONTINUE WHEN waits ? ticket.attempt::text;
        SELECT jsonb_object_agg(coalesce(c.attempt::text, c.session || ' ' || c.blocker), number + 1) INTO members
        FROM find_cycle(ticket.name, ticket.attempt) AS c;
        IF members IS NOT NULL THEN
            number := number + 1;
            waits := members || waits;
        END IF;
    END LOOP;
    RETURN QUERY
        SELECT edge.waiter, edge.lock, edge.holder, edge.token, edge.seconds, edge.session, edge.blocker,
               (waits ->> edge.key)::integer
        FROM (
            SELECT t.holder AS waiter, t.name AS lock, l.holder AS holder,
                   -- A grant that is not durable has no fencing token.
                   CASE WHEN l.token > 0 THEN l.token END AS token,
                   date_part('epoch', clock_timestamp()) - date_part('epoch', t.since) AS seconds,
                   NULL::integer AS session, NULL::integer AS blocker, t.attempt::text AS key, t.number AS place
            FROM lock_tickets AS t
            JOIN lock_clients AS c ON c.client = t.client AND c.seen_until > clock_timestamp()
            -- A read-write lock or a semaphore is held through its shares.
            JOIN distributed_locks AS l
                ON (l.name = t.name OR l.head = t.name) AND l.expires_at > clock_timestamp()
            UNION ALL
            SELECT coalesce(l.holder, 'session ' || b.session), NULL,
                   coalesce(o.holder, 'session ' || blocked.by), CASE WHEN o.token > 0 THEN o.token END,
                   NULL, b.session, blocked.by, b.session || ' ' || blocked.by, NULL
            FROM bound_sessions() AS b
            CROSS JOIN LATERAL unnest(pg_blocking_pids(b.session)) AS blocked (by)
            -- Not the head of a shared lock, which has the token of its newest share.
            LEFT JOIN distributed_locks AS l ON l.token = b.token AND l.expires_at > '-infinity'
            LEFT JOIN bound_sessions() AS other ON other.session = blocked.by
            LEFT JOIN distributed_locks AS o ON o.token = other.token AND o.expires_at > '-infinity'
        ) AS edge
        ORDER BY edge.lock, edge.place, edge.session
        LIMIT wait_graph.max_rows;
END
$$;
