-- Grants the lock if it is this attempt's turn, else leaves a ticket in the lock's queue, first
-- come, first served. Call it again with the same `attempt` when a notification arrives on the
-- client's channel. See docs/reference/sql.md.
--
-- `attempt` identifies the request and its ticket: a retry after a lost reply finds its own ticket.
-- `client` identifies the waiting process, which must call heartbeat() every second, or its tickets
-- are pruned. `had_ticket` is for a waiter that asks again: the call then skips dead waiters ahead.
--
-- The ticket is inserted while the queue is locked, after a check whether the lock is free. An
-- asynchronous release of a lock with a queue looks for the first ticket, and if it finds none, it
-- waits a moment for the queue. So it either precedes the check, which sees the free lock, or it
-- sees the ticket. If the queue is empty, a release does not look at it: therefore the call then
-- also locks the row, which every release needs, and marks the lock as waited for. After a durable
-- release, and after one that did not get the queue, the waiter's heartbeat finds the free lock.
-- Tickets are numbered while the queue is locked, so their order is the order of arrival. Redeeming
-- a ticket does not lock the queue, so that other clients can join while the grant is written to
-- disk. Only try_acquire() grants, because it is the one place where tokens are minted.
--
-- The call waits up to 20 ms for another transaction that uses the lock, or with `wait => false`
-- 1 ms. If the lock or its queue stays locked, `remaining` is 0 and `ticket` is NULL: ask
-- again a little later. If the queue has changed since an older snapshot, the call fails to
-- serialize. `fresh` means that the ticket is new. `first` is true only if this waiter is known to
-- be next; false can also mean that this was not checked. `watched` means that the holder has a
-- presence, so that frequent checks are worth it.
CREATE OR REPLACE FUNCTION acquire(
    name text,
    ttl interval DEFAULT '30 seconds',
    holder text DEFAULT NULL,
    meta jsonb DEFAULT NULL,
    attempt uuid DEFAULT NULL,
    client uuid DEFAULT NULL,
    durable boolean DEFAULT true,
    fair boolean DEFAULT true,
    presence uuid DEFAULT NULL,
    had_ticket boolean DEFAULT false,
    wait boolean DEFAULT true,
    OUT granted boolean,
    OUT token bigint,
    OUT expires_at timestamptz,
    OUT remaining double precision,
    OUT ticket bigint,
    OUT first boolean,
    OUT watched boolean,
    OUT fresh boolean
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
    alone boolean := pg_current_xact_id_if_assigned() IS NULL;
    patience text;
    -- What the lock's row says. Not a record, which costs more.
    seen_token bigint;
    seen_attempt uuid;
    seen_presence uuid;
    seen_waiting boolean;
    seen_kind text;
    seen_expires_at timestamptz;
    reserved boolean;
    -- Seconds that the lease in the row still has. Negative if the lock is free.
    left_over double precision;
    free boolean;
    heard boolean;
    reply record;
    grace double precision;
    ignored text;
BEGIN
    -- Each expression is prepared again in each transaction. So the usual way through this function
    -- has few of them, and queries return what would else be an assignment.
    IF octet_length(acquire.name) BETWEEN 1 AND 512 AND date_part('epoch', acquire.ttl) BETWEEN 0.1 AND 86400
        AND octet_length(acquire.holder) <= 512 AND acquire.meta IS NULL
        AND acquire.attempt IS NOT NULL AND acquire.client IS NOT NULL
    THEN
        -- Hot path: the usual arguments need no call of check_request().
    ELSE
        ready := check_request(acquire.name, acquire.ttl, acquire.holder, acquire.meta);
        IF acquire.attempt IS NULL OR acquire.client IS NULL THEN
            RAISE EXCEPTION 'acquire needs an attempt and a client to queue for lock %.', quote_literal(acquire.name)
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        IF acquire.holder IS NULL THEN
            acquire.holder := describe_session();
        END IF;
    END IF;
    IF alone THEN
        -- Hot path: commit_asynchronously() inlined. A lost ticket only costs a new one. A grant
        -- below commits durably.
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;

    -- Lock the queue and, while it is empty, the lock's row too. Subtract numbers: Postgres before
    -- 17 cannot subtract from an infinite timestamp.
    IF sees_latest_commits() THEN
        PERFORM 1 FROM lock_queues AS q WHERE q.name = acquire.name FOR NO KEY UPDATE SKIP LOCKED;
    END IF;
    IF FOUND THEN
        SELECT l.token, l.attempt, l.presence, l.waiting, l.kind, l.expires_at,
               date_part('epoch', l.expires_at) - date_part('epoch', clock_timestamp()),
               -- Whether the lock is reserved for a ticket of another attempt.
               CASE WHEN l.waiting AND l.expires_at <= clock_timestamp() THEN (
                   SELECT t.attempt <> acquire.attempt FROM lock_tickets AS t
                   WHERE t.name = acquire.name ORDER BY t.number LIMIT 1
               ) END
        INTO seen_token, seen_attempt, seen_presence, seen_waiting, seen_kind, seen_expires_at, left_over, reserved
        FROM distributed_locks AS l WHERE l.name = acquire.name;
        IF NOT seen_waiting THEN
            SELECT l.token, l.attempt, l.presence, l.waiting, l.kind, l.expires_at,
                   date_part('epoch', l.expires_at) - date_part('epoch', clock_timestamp())
            INTO seen_token, seen_attempt, seen_presence, seen_waiting, seen_kind, seen_expires_at, left_over
            FROM distributed_locks AS l WHERE l.name = acquire.name
            FOR NO KEY UPDATE SKIP LOCKED;
        END IF;
    END IF;
    IF NOT FOUND THEN
        patience := current_setting('lock_timeout');
        BEGIN
            ignored := set_config('lock_timeout', CASE WHEN acquire.wait THEN '20ms' ELSE '1ms' END, true);
            PERFORM lock_or_create_queue(acquire.name);
            LOOP
                SELECT l.token, l.attempt, l.presence, l.waiting, l.kind, l.expires_at,
                       date_part('epoch', l.expires_at) - date_part('epoch', clock_timestamp())
                INTO seen_token, seen_attempt, seen_presence, seen_waiting, seen_kind, seen_expires_at, left_over
                FROM distributed_locks AS l WHERE l.name = acquire.name;
                IF NOT seen_waiting THEN
                    SELECT l.token, l.attempt, l.presence, l.waiting, l.kind, l.expires_at,
                           date_part('epoch', l.expires_at) - date_part('epoch', clock_timestamp())
                    INTO seen_token, seen_attempt, seen_presence, seen_waiting, seen_kind, seen_expires_at, left_over
                    FROM distributed_locks AS l WHERE l.name = acquire.name
                    FOR NO KEY UPDATE;
                END IF;
                EXIT WHEN FOUND;
                INSERT INTO distributed_locks (name, token, expires_at)
                VALUES (acquire.name, 0, '-infinity')
                ON CONFLICT DO NOTHING;
            END LOOP;
            ignored := set_config('lock_timeout', patience, true);
        EXCEPTION WHEN lock_not_available THEN
            granted := false;
            remaining := 0;
            first := false;
            watched := false;
            RETURN;
        END;
    END IF;

    IF (left_over > 0 OR (reserved AND acquire.fair)) AND seen_waiting AND NOT acquire.had_ticket
        AND seen_attempt IS DISTINCT FROM acquire.attempt AND seen_kind IS NULL
    THEN
        -- Hot path: a new waiter behind others. Whether they and the holder are alive is not worth
        -- a check here. The waiter's heartbeat finds out within a second.
    ELSE
        IF seen_kind IS NOT NULL THEN
            ready := refuse_kind(acquire.name, 'a plain lock');
        END IF;
        free := left_over <= 0;
        IF NOT free AND seen_presence IS NOT NULL AND seen_attempt IS DISTINCT FROM acquire.attempt THEN
            grace := remaining_grace(seen_presence, true, true);
            IF grace <= 0 THEN
                free := free_dead_holder(acquire.name, seen_token, seen_presence);
                grace := NULL;
            END IF;
        END IF;
        first := true;
        IF free AND seen_waiting THEN
            SELECT t.attempt = acquire.attempt INTO first
            FROM lock_tickets AS t WHERE t.name = acquire.name ORDER BY t.number LIMIT 1;
            IF NOT first AND acquire.had_ticket THEN
                -- A new waiter skips the liveness check of the waiters ahead. A returning waiter
                -- performs it.
                SELECT f.attempt = acquire.attempt INTO first FROM first_in_queue(acquire.name, true) AS f;
            END IF;
            first := coalesce(first, true);
        END IF;
        IF (free AND (first OR NOT acquire.fair)) OR (NOT free AND seen_attempt = acquire.attempt) THEN
            reply := try_acquire(
                acquire.name, acquire.ttl, acquire.holder, acquire.meta, acquire.attempt, acquire.durable,
                presence => acquire.presence, fair => false
            );
            IF reply.granted THEN
                DELETE FROM lock_tickets AS t WHERE t.attempt = acquire.attempt AND t.name = acquire.name;
                granted := true;
                token := reply.token;
                expires_at := reply.expires_at;
                remaining := reply.remaining;
                RETURN;
            END IF;
            IF alone THEN
                ignored := set_config('synchronous_commit', 'off', true);
            END IF;
        END IF;
        -- A waiter that joins others is first only if the lock is free.
        first := first AND (free OR NOT seen_waiting);
        IF acquire.had_ticket THEN
            -- Add a presence that was registered after the ticket was issued, so that its end is
            -- noticed. The ticket follows the client that asks, see keep_ticket().
            UPDATE lock_tickets AS t SET presence = coalesce(acquire.presence, t.presence), client = acquire.client
            WHERE t.attempt = acquire.attempt AND t.name = acquire.name
            RETURNING t.number INTO ticket;
        END IF;
        IF NOT seen_waiting THEN
            UPDATE distributed_locks AS l SET waiting = true WHERE l.name = acquire.name;
        END IF;
    END IF;

    IF ticket IS NULL THEN
        WITH joined AS (
            UPDATE lock_queues AS q SET last_ticket = q.last_ticket + 1 WHERE q.name = acquire.name
            RETURNING q.last_ticket
        )
        INSERT INTO lock_tickets AS t (name, number, attempt, client, presence, holder, since)
        SELECT acquire.name, j.last_ticket, acquire.attempt, acquire.client, acquire.presence,
               acquire.holder, clock_timestamp()
        FROM joined AS j
        -- The attempt's own ticket, after a lost reply. The number of the new one is skipped.
        ON CONFLICT ON CONSTRAINT lock_tickets_attempt_key DO NOTHING
        RETURNING t.number, true, coalesce(first, false), false, greatest(least(left_over, grace), 0),
            CASE WHEN left_over > 0 THEN seen_expires_at END, left_over > 0 AND seen_presence IS NOT NULL,
            EXISTS (
                SELECT FROM lock_clients AS c
                WHERE c.client = acquire.client AND c.seen_until > clock_timestamp() + interval '2 seconds'
            )
        INTO ticket, fresh, first, granted, remaining, expires_at, watched, heard;
    END IF;
    IF heard THEN
        -- Hot path: a new ticket, of a client whose heartbeat counts for long enough.
        RETURN;
    END IF;
    IF ticket IS NULL THEN
        UPDATE lock_tickets AS t SET presence = coalesce(acquire.presence, t.presence), client = acquire.client
        WHERE t.attempt = acquire.attempt AND t.name = acquire.name
        RETURNING t.number INTO ticket;
    END IF;
    PERFORM touch_client(acquire.client);
    fresh := fresh IS TRUE;
    first := first IS TRUE;
    granted := false;
    remaining := greatest(least(left_over, grace), 0);
    expires_at := CASE WHEN left_over > 0 THEN seen_expires_at END;
    watched := left_over > 0 AND seen_presence IS NOT NULL;
END
$$;
