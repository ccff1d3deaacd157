-- Returns the shortest cycle of waits that leads through this ticket, in order, one row per wait.
-- No row means that there is none.
--
-- A ticket waits for the holders of its lock (tokens_in_the_way). A holder's token leads to the
-- tickets of the thread or task that holds it (waiting_holds), and to the sessions that work under
-- it (bound_sessions). A session that waits for another one (pg_blocking_pids) leads to the tokens
-- of that session.
--
-- Only a way back to the ticket itself is a cycle. Waits that converge, and a cycle that the ticket
-- only leads to, are not. Every ticket and session is visited once. A search ends after five
-- hundred of them.
--
-- Waits that end by themselves are no edges: for a lease that has expired, or that a forced release
-- has ended, and those of dead clients. The caller leaves out tokens of leases that are not
-- renewed.
--
-- STABLE: every query uses the snapshot of the caller's statement, so the tickets, locks and tokens
-- of the cycle existed at one moment. Without that, waits of different moments could be put
-- together to a cycle that never was. Locks of sessions are read as they are now.
CREATE OR REPLACE FUNCTION find_cycle(of_lock text, of_attempt uuid)
RETURNS TABLE (
    waiter text,
    lock text,
    holder text,
    token bigint,
    session integer,
    blocker integer,
    attempt uuid,
    client uuid,
    since timestamptz
)
LANGUAGE plpgsql STABLE
AS $$
#variable_conflict use_column
DECLARE
    -- The visited nodes: a ticket has an attempt and a name, a session a process number. The number
    -- is negative for a session that works under a token which leads to it, and positive for a
    -- session that blocks another one.
    attempts uuid[] := ARRAY[of_attempt];
    names text[] := ARRAY[of_lock];
    sessions integer[] := ARRAY[NULL]::integer[];
    -- The node and the token that lead to each of them.
    parents integer[] := ARRAY[NULL]::integer[];
    tokens bigint[] := ARRAY[NULL]::bigint[];
    bound_sessions integer[];
    bound_tokens bigint[];
    here integer := 0;
    lock_here text;
    attempt_here uuid;
    session_here integer;
    held bigint[];
    closing bigint;
    seen record;
    way integer[] := '{}';
    step integer;
    next_token bigint;
    next_holder text;
BEGIN
    SELECT array_agg(b.session), array_agg(b.token) INTO bound_sessions, bound_tokens
    FROM bound_sessions() AS b
    HAVING bool_or(b.waits);
    -- Usually no session matters and there is no cycle. One query finds that out.
    IF bound_sessions IS NULL AND NOT EXISTS (
        WITH RECURSIVE reached (attempt, name, closes) AS (
            SELECT of_attempt, of_lock COLLATE "C", false
            UNION
            SELECT t.attempt, t.name, t.attempt = of_attempt
            FROM reached AS r
            CROSS JOIN LATERAL tokens_in_the_way(r.name, r.attempt) AS b
            JOIN waiting_holds AS w ON w.token = b.token
            JOIN lock_tickets AS t ON t.attempt = w.attempt AND t.name = w.name
            JOIN lock_clients AS c ON c.client = t.client AND c.seen_until > clock_timestamp()
            WHERE NOT r.closes
        )
        SELECT FROM (SELECT r.closes FROM reached AS r LIMIT 500) AS visited WHERE visited.closes
    ) THEN
        RETURN;
    END IF;
    <<search>>
    LOOP
        here := here + 1;
        IF here > cardinality(attempts) OR here > 500 THEN
            RETURN;
        END IF;
        -- Copied, because a query that uses an element of an array gets the whole array.
        lock_here := names[here];
        session_here := sessions[here];
        IF lock_here IS NOT NULL THEN
            attempt_here := attempts[here];
            SELECT array_agg(b.token) INTO held FROM tokens_in_the_way(lock_here, attempt_here) AS b;
        ELSIF session_here > 0 THEN
            SELECT array_agg(b.token) INTO held
            FROM unnest(bound_sessions, bound_tokens) AS b (session, token) WHERE b.session = session_here;
        ELSE
            held := NULL;
        END IF;
        IF held IS NOT NULL THEN
            FOR seen IN
                SELECT w.token, t.attempt, t.name
                FROM waiting_holds AS w
                JOIN lock_tickets AS t ON t.attempt = w.attempt AND t.name = w.name
                JOIN lock_clients AS c ON c.client = t.client AND c.seen_until > clock_timestamp()
                WHERE w.token = ANY (held)
            LOOP
                IF seen.attempt = of_attempt AND seen.name = of_lock THEN
                    closing := seen.token;
                    EXIT search;
                END IF;
                CONTINUE WHEN seen.attempt = ANY (attempts);
                attempts := attempts || seen.attempt;
                names := names || seen.name;
                sessions := sessions || NULL::integer;
                parents := parents || here;
                tokens := tokens || seen.token;
            END LOOP;
        END IF;
        CONTINUE WHEN bound_sessions IS NULL;
        FOR seen IN
            SELECT -b.session AS session, b.token
            FROM unnest(bound_sessions, bound_tokens) AS b (session, token) WHERE b.token = ANY (held)
            UNION ALL
            SELECT p.session, NULL
            FROM unnest(pg_blocking_pids(abs(session_here))) AS p (session) WHERE p.session > 0
        LOOP
            CONTINUE WHEN seen.session = ANY (sessions);
            attempts := attempts || NULL::uuid;
            names := names || NULL::text;
            sessions := sessions || seen.session;
            parents := parents || here;
            tokens := tokens || seen.token;
        END LOOP;
    END LOOP;

    WHILE here IS NOT NULL LOOP
        way := here || way;
        here := parents[here];
    END LOOP;
    -- A client whose session has ended is dead, though its last heartbeat may still count.
    IF EXISTS (
        SELECT FROM lock_tickets AS t
        JOIN lock_presence AS p ON p.presence = t.presence AND p.incarnation = pg_postmaster_start_time()
        WHERE t.attempt = ANY (attempts) AND t.attempt IN (SELECT attempts[w] FROM unnest(way) AS w)
          AND NOT EXISTS (SELECT FROM pg_stat_get_activity(p.session))
    ) THEN
        RETURN;
    END IF;
    FOR place IN 1 .. cardinality(way) LOOP
        step := way[place];
        next_token := CASE WHEN place < cardinality(way) THEN tokens[way[place + 1]] ELSE closing END;
        IF attempts[step] IS NOT NULL THEN
            SELECT t.holder, t.name, t.attempt, t.client, t.since
            INTO waiter, lock, attempt, client, since
            FROM lock_tickets AS t WHERE t.attempt = attempts[step] AND t.name = names[step];
            token := next_token;
            SELECT l.holder INTO next_holder
            FROM distributed_locks AS l
            -- The head of a shared lock has the token of its newest share, and no holder.
            WHERE (l.name = lock OR l.head = lock) AND l.token = next_token AND l.expires_at > '-infinity';
            holder := next_holder;
            session := NULL;
            blocker := NULL;
            RETURN NEXT;
        ELSIF place < cardinality(way) AND sessions[way[place + 1]] > 0 THEN
            -- A session waits for the next one. A session that blocks and does not wait itself only
            -- leads to the ticket of its token.
            waiter := coalesce(next_holder, 'session ' || abs(sessions[step]));
            session := abs(sessions[step]);
            blocker := sessions[way[place + 1]];
            lock := NULL;
            attempt := NULL;
            client := NULL;
            since := NULL;
            -- The blocker's own token, if it works under one: the token by which the way goes on.
            token := CASE WHEN place + 2 <= cardinality(way) THEN tokens[way[place + 2]] ELSE closing END;
            next_holder := NULL;
            SELECT t.holder INTO next_holder
            FROM lock_tickets AS t
            WHERE t.attempt = CASE WHEN place + 2 <= cardinality(way) THEN attempts[way[place + 2]]
                                   ELSE of_attempt END
            LIMIT 1;
            holder := coalesce(next_holder, 'session ' || blocker);
            RETURN NEXT;
        END IF;
    END LOOP;
END
$$;
