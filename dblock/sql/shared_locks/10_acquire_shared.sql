-- Grants a share of a read-write lock or of a semaphore if it is this attempt's turn. Else leaves a
-- ticket in the lock's queue, first come, first served, or without a `client` nothing.
--
-- `kind` is `read-write`, with the `mode` `read` or `write`, or `semaphore`, with its number of
-- `permits`. NULL takes the number that the semaphore has. The first call creates the lock. A name
-- of another kind is refused with SQLSTATE DBL10, another number of permits with DBL11.
--
-- A reader is granted its share if no writer holds the lock and no live writer is ahead in the
-- queue. A writer is granted it if no share is held and no live waiter is ahead. A permit is
-- granted if more permits are free than live waiters are ahead. A call without a `client` comes
-- after every waiter.
--
-- `share` is the name by which to renew and release the grant, and `permit` its number. The other
-- arguments and results are those of acquire(). If another transaction keeps the lock locked,
-- `remaining` is 0 and `ticket` and `fresh` are NULL: ask again a little later. A waiter that is
-- not granted the lock asks again when it is notified, or after `remaining` seconds if it is
-- `first`.
CREATE OR REPLACE FUNCTION acquire_shared(
    name text,
    kind text,
    mode text DEFAULT NULL,
    INOUT permits integer DEFAULT NULL,
    ttl interval DEFAULT '30 seconds',
    holder text DEFAULT NULL,
    meta jsonb DEFAULT NULL,
    attempt uuid DEFAULT NULL,
    client uuid DEFAULT NULL,
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
    OUT fresh boolean,
    OUT share text,
    OUT permit integer
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    -- How soon a waiter asks again whose turn it is, but for an open transaction that has proved an
    -- expired lease.
    proved_retry CONSTANT double precision := 0.2;
    ready boolean := check_shared_name(acquire_shared.name)
        AND check_request(acquire_shared.name, acquire_shared.ttl, acquire_shared.holder, acquire_shared.meta);
    alone boolean := pg_current_xact_id_if_assigned() IS NULL;
    lease_time CONSTANT interval := make_interval(secs => date_part('epoch', acquire_shared.ttl));
    share_kind CONSTANT text := CASE acquire_shared.mode
        WHEN 'read' THEN 'reader' WHEN 'write' THEN 'writer' ELSE 'permit'
    END;
    asked CONSTANT integer := acquire_shared.permits;
    head record;
    mine record;
    shares record;
    takeover boolean;
    -- How many shares are free for the waiters at the front, and how many of those are ahead.
    free integer;
    ahead integer;
    in_turn boolean;
    eligible boolean;
    ignored text;
BEGIN
    IF ((acquire_shared.kind = 'read-write' AND acquire_shared.mode IN ('read', 'write') AND asked IS NULL)
        OR (acquire_shared.kind = 'semaphore' AND acquire_shared.mode IS NULL
            AND coalesce(asked BETWEEN 1 AND 100000, true))) IS NOT TRUE
    THEN
        RAISE EXCEPTION
            'A shared lock is of kind read-write with mode read or write, or of kind semaphore with 1 to 100000 permits;'
            ' got kind %, mode % and % permits for lock %.',
            coalesce(acquire_shared.kind, 'none'), coalesce(acquire_shared.mode, 'none'), coalesce(asked::text, 'no'),
            quote_literal(acquire_shared.name)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF acquire_shared.client IS NOT NULL AND acquire_shared.attempt IS NULL THEN
        RAISE EXCEPTION 'acquire_shared needs an attempt to queue for lock %.', quote_literal(acquire_shared.name)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF alone THEN
        -- A lost ticket only costs a new one. A grant below commits durably.
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    granted := false;
    first := false;
    watched := false;
    remaining := 0;

    IF NOT lock_head(
        acquire_shared.name, CASE WHEN acquire_shared.wait THEN 20 ELSE 1 END,
        CASE WHEN acquire_shared.kind = 'read-write' OR asked IS NOT NULL THEN acquire_shared.kind END, asked
    ) THEN
        IF acquire_shared.kind = 'semaphore' AND asked IS NULL
            AND NOT EXISTS (SELECT FROM distributed_locks AS l WHERE l.name = acquire_shared.name)
        THEN
            RAISE EXCEPTION 'There is no semaphore %. Say how many permits it has.', quote_literal(acquire_shared.name)
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        RETURN;
    END IF;
    SELECT l.kind, l.permits, l.waiting INTO head FROM distributed_locks AS l WHERE l.name = acquire_shared.name;
    IF head.kind IS DISTINCT FROM acquire_shared.kind THEN
        IF head.kind IS NOT NULL OR (acquire_shared.kind = 'semaphore' AND asked IS NULL)
            OR NOT is_unused(acquire_shared.name)
        THEN
            ready := refuse_kind(acquire_shared.name, describe_kind(acquire_shared.kind));
        END IF;
        UPDATE distributed_locks AS l SET kind = acquire_shared.kind, permits = asked, waiting = false
        WHERE l.name = acquire_shared.name
        RETURNING l.kind, l.permits, l.waiting INTO head;
    END IF;
    permits := head.permits;
    -- In a transaction with an older snapshot, the head's row does not tell of new tickets.
    IF NOT sees_latest_commits() AND NOT lock_queue(acquire_shared.name, 20) THEN
        RETURN;
    END IF;

    IF acquire_shared.attempt IS NOT NULL THEN
        SELECT s.name, s.token, s.expires_at, s.permit INTO mine
        FROM distributed_locks AS s
        WHERE s.head = acquire_shared.name AND s.kind = share_kind AND s.attempt = acquire_shared.attempt
          AND s.expires_at > clock_timestamp();
        IF FOUND THEN
            -- The reply to the first call was lost. It may have been interrupted before its commit
            -- was durable. This write makes the retry wait for a durable commit of its own.
            ready := commit_durably();
            UPDATE distributed_locks AS s SET attempt = s.attempt WHERE s.name = mine.name AND s.token = mine.token;
            DELETE FROM lock_tickets AS t WHERE t.attempt = acquire_shared.attempt AND t.name = acquire_shared.name;
            granted := true;
            token := mine.token;
            expires_at := mine.expires_at;
            remaining := greatest(date_part('epoch', mine.expires_at) - date_part('epoch', clock_timestamp()), 0);
            share := mine.name;
            permit := mine.permit;
            RETURN;
        END IF;
        IF head.waiting THEN
            SELECT t.number INTO ticket FROM lock_tickets AS t
            WHERE t.attempt = acquire_shared.attempt AND t.name = acquire_shared.name;
        END IF;
    END IF;
    -- An attempt that has a grant or a ticket agreed on the number before. It may have been changed
    -- since.
    IF asked <> head.permits AND ticket IS NULL AND NOT acquire_shared.had_ticket THEN
        RAISE EXCEPTION 'Semaphore % has % permits, but this call asks for one with %.',
            quote_literal(acquire_shared.name), head.permits, asked
            USING ERRCODE = 'DBL11', DETAIL = json_build_object('name', acquire_shared.name, 'permits', head.permits, 'asked', asked)::text,
                  HINT = 'Use the same number everywhere. Change it with resize_semaphore().';
    END IF;

    -- What this call finds and records about a holder should be committed at once. So a call
    -- without an attempt, whose transaction may stay open, leaves the check to others.
    takeover := (acquire_shared.attempt IS NOT NULL
            OR statement_timestamp() < transaction_timestamp() + interval '100 microseconds')
        AND (acquire_shared.had_ticket OR acquire_shared.client IS NULL OR NOT head.waiting);
    shares := look_at_shares(acquire_shared.name, excluding_kinds(acquire_shared.mode), takeover, takeover);
    free := CASE
        WHEN acquire_shared.mode IS NULL THEN greatest(head.permits - shares.held, 0)
        WHEN shares.held = 0 THEN 1
        ELSE 0
    END;
    ahead := CASE WHEN head.waiting THEN (
        SELECT count(*) FROM live_tickets(
            acquire_shared.name,
            CASE WHEN acquire_shared.mode IS NULL THEN free + 1 ELSE 1 END,
            CASE WHEN acquire_shared.mode = 'read' THEN 'write' END,
            ticket,
            acquire_shared.had_ticket OR free > 0
        )
    ) ELSE 0 END;
    in_turn := CASE WHEN acquire_shared.mode IS NULL THEN ahead < free ELSE free > 0 AND ahead = 0 END;

    IF in_turn THEN
        eligible := true;
        IF acquire_shared.mode = 'write' THEN
            eligible := lock_free_shares(acquire_shared.name, '{reader,writer}') = 0;
        ELSIF acquire_shared.mode = 'read' THEN
            eligible := lock_free_shares(acquire_shared.name, '{writer}') = 0;
            permit := lowest_free_share(acquire_shared.name, 'reader', 2147483647);
        ELSE
            IF EXISTS (
                SELECT FROM distributed_locks AS s
                WHERE s.head = acquire_shared.name AND s.kind = 'permit' AND s.permit >= head.permits
            ) THEN
                -- The semaphore was made smaller. A free share with a higher number may be proved
                -- in an open transaction, and then counts as held.
                eligible := lock_free_shares(acquire_shared.name, '{permit}') < head.permits;
            END IF;
            permit := lowest_free_share(acquire_shared.name, 'permit', head.permits);
            eligible := eligible AND permit IS NOT NULL;
        END IF;
        IF eligible THEN
            share := take_share(acquire_shared.name, share_kind, permit);
        END IF;
        IF share IS NOT NULL THEN
            SELECT g.token, g.expires_at INTO token, expires_at
            FROM grant_share(
                acquire_shared.name, share, lease_time, coalesce(acquire_shared.holder, describe_session()),
                acquire_shared.meta, acquire_shared.attempt, acquire_shared.presence
            ) AS g;
            granted := true;
            remaining := date_part('epoch', lease_time);
            IF head.waiting THEN
                DELETE FROM lock_tickets AS t WHERE t.name = acquire_shared.name AND t.number = acquire_shared.ticket;
                UPDATE distributed_locks AS l
                SET last_served_ticket = greatest(l.last_served_ticket, acquire_shared.ticket),
                    waiting = EXISTS (SELECT FROM lock_tickets AS t WHERE t.name = acquire_shared.name)
                WHERE l.name = acquire_shared.name;
            END IF;
            ticket := NULL;
            RETURN;
        END IF;
        permit := NULL;
    END IF;

    first := CASE WHEN acquire_shared.mode IS NULL THEN ahead <= free ELSE ahead = 0 END;
    watched := shares.watched;
    expires_at := shares.expires_at;
    remaining := CASE
        WHEN in_turn AND shares.held > 0 THEN least(shares.next_check, proved_retry)
        WHEN in_turn THEN proved_retry
        ELSE shares.next_check
    END;
    IF acquire_shared.client IS NULL THEN
        -- A share is free, but another transaction has locked its row: not decided.
        IF in_turn THEN
            remaining := 0;
        ELSE
            fresh := false;
        END IF;
        RETURN;
    END IF;
    fresh := false;
    IF ticket IS NOT NULL THEN
        -- A presence that was registered after the ticket was issued, so that its end is noticed.
        -- The ticket follows the client that asks, see keep_ticket().
        UPDATE lock_tickets AS t
        SET presence = coalesce(acquire_shared.presence, t.presence), client = acquire_shared.client
        WHERE t.name = acquire_shared.name AND t.number = acquire_shared.ticket
          AND (t.client <> acquire_shared.client
               OR t.presence IS DISTINCT FROM coalesce(acquire_shared.presence, t.presence));
    ELSE
        fresh := true;
        LOOP
            UPDATE lock_queues AS q SET last_ticket = q.last_ticket + 1 WHERE q.name = acquire_shared.name
            RETURNING q.last_ticket INTO ticket;
            EXIT WHEN FOUND;
            PERFORM lock_or_create_queue(acquire_shared.name);
        END LOOP;
        INSERT INTO lock_tickets (name, number, attempt, client, presence, holder, since, mode)
        VALUES (
            acquire_shared.name, acquire_shared.ticket, acquire_shared.attempt, acquire_shared.client,
            acquire_shared.presence, coalesce(acquire_shared.holder, describe_session()), clock_timestamp(),
            acquire_shared.mode
        );
        IF NOT head.waiting THEN
            UPDATE distributed_locks AS l SET waiting = true WHERE l.name = acquire_shared.name;
        END IF;
    END IF;
    PERFORM touch_client(acquire_shared.client);
END
$$;
