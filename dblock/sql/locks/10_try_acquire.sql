-- Grants the lock if it is free and its queue is empty. Waits neither for a holder nor for another
-- transaction that has locked the row (to grant the lock, release it or prove it). In the second
-- case the lock is not granted, and `remaining` is 0.
--
-- The token is minted while this transaction holds the row, after the last check of the row, so
-- token order is grant order. A new row is inserted free, and then granted like any other. (If the
-- INSERT minted the token, a session that is overtaken between minting and inserting would get a
-- lower token than its predecessor.) A call that is not granted takes no row lock, so a crowd of
-- such calls does not delay the holder's renewal.
--
-- `attempt` identifies this request. If its reply is lost, a retry finds the grant that it already
-- made, instead of an unknown holder. With `retry` the call waits for a transaction that has locked
-- the row, because that may be the first call, not yet committed. After two seconds it fails.
--
-- A holder whose process is known to be gone (see remaining_grace) holds nothing. `presence` ties
-- the grant to the caller's session in the same way. Without it, only the ttl decides. A queue of
-- dead waiters does not count either. What a call finds and records about a holder should be
-- committed at once. So a call without an `attempt`, whose transaction may stay open, checks the
-- waiters only if no heartbeat of theirs counts. It checks the holder only if the call does not
-- look like a part of a longer transaction, and if no live waiter does so itself.
--
-- With `fair => false` the call takes a free lock ahead of its queue. With a `ticket`, which
-- acquire() gave to the same attempt, it redeems the ticket if no ticket is ahead. `waiting` in the
-- reply means that the lock is free and reserved for its queue.
--
-- With `durable => false` the grant does not wait for the disk and carries no fencing token.
-- `token` is then a random negative number, to renew and release with.
--
-- `remaining` is the time left in seconds, of this grant or of the holder's lease. Clients need it
-- so that they never compare `expires_at` with their own clock.
CREATE OR REPLACE FUNCTION try_acquire(
    name text,
    ttl interval DEFAULT '30 seconds',
    holder text DEFAULT NULL,
    meta jsonb DEFAULT NULL,
    attempt uuid DEFAULT NULL,
    durable boolean DEFAULT true,
    retry boolean DEFAULT false,
    presence uuid DEFAULT NULL,
    fair boolean DEFAULT true,
    ticket bigint DEFAULT NULL,
    OUT granted boolean,
    OUT token bigint,
    OUT expires_at timestamptz,
    OUT remaining double precision,
    OUT waiting boolean
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
    -- The ttl. Only seconds: a day or a month of the calendar may last longer or shorter.
    seconds double precision;
    -- The lock's last token, and the server start under which it was minted.
    last_token bigint;
    minted_start timestamptz;
    minted bigint;
    last_served bigint;
    -- Where the row is, once it is locked.
    version tid;
    -- Whether the last lease expired without a release.
    has_expired boolean;
    -- Whether the call has looked at the row before.
    looked boolean;
    patience text;
    -- Whether this call is likely to be a transaction of its own. (A driver may send the call in
    -- two messages, of which the first starts the transaction.)
    alone boolean;
    moment timestamptz;
    seen record;
    grace double precision;
    ignored text;
BEGIN
    IF NOT try_acquire.durable AND pg_current_xact_id_if_assigned() IS NULL THEN
        -- Hot path: commit_asynchronously() inlined.
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    -- Each expression is prepared again in each transaction, and each function in it costs.
    seconds := date_part('epoch', try_acquire.ttl);
    IF seconds BETWEEN 0.1 AND 86400 AND octet_length(try_acquire.holder) <= 512 AND try_acquire.meta IS NULL
        AND NOT try_acquire.retry
    THEN
        -- Hot path: the usual arguments need no call of check_request(). The name of a lock that
        -- exists is valid, that of another is checked below.
    ELSE
        ready := check_request(try_acquire.name, try_acquire.ttl, try_acquire.holder, try_acquire.meta);
        IF try_acquire.holder IS NULL THEN
            try_acquire.holder := describe_session();
        END IF;
        IF try_acquire.retry THEN
            patience := current_setting('lock_timeout');
            ignored := set_config('lock_timeout', '2s', true);
            INSERT INTO distributed_locks (name, token, expires_at)
            VALUES (try_acquire.name, 0, '-infinity')
            ON CONFLICT DO NOTHING;
            PERFORM 1 FROM distributed_locks AS l WHERE l.name = try_acquire.name FOR KEY SHARE;
            ignored := set_config('lock_timeout', patience, true);
        END IF;
    END IF;
    -- While any session of the cluster has an old snapshot, all versions of the row stay, and the
    -- index has an entry for each page of them. The newest is usually the last one. So the query
    -- looks at them from the end, which Postgres does for a range alone.
    LOOP
        SELECT l.token, l.minted_server_start, l.last_served_ticket, l.expires_at > '-infinity', l.ctid
        INTO last_token, minted_start, last_served, has_expired, version
        FROM distributed_locks AS l
        WHERE l.name >= try_acquire.name AND l.name <= try_acquire.name
          AND l.expires_at <= clock_timestamp() AND l.kind IS NULL
          -- A ticket in the queue comes first.
          AND NOT (l.waiting AND try_acquire.fair AND try_acquire.ticket IS NULL)
        ORDER BY l.name DESC
        LIMIT 1
        FOR UPDATE SKIP LOCKED;  -- the strongest lock: it also conflicts with the KEY SHARE of assert_held()
        IF FOUND THEN
            IF try_acquire.ticket IS NOT NULL THEN
                IF try_acquire.ticket = last_served + 1 THEN
                    -- Hot path: no number lies between.
                    DELETE FROM lock_tickets AS t
                    WHERE t.name = try_acquire.name AND t.number = try_acquire.ticket
                      AND t.attempt = try_acquire.attempt;
                ELSE
                    DELETE FROM lock_tickets AS t
                    WHERE t.name = try_acquire.name AND t.number = try_acquire.ticket
                      AND t.attempt = try_acquire.attempt
                      AND NOT EXISTS (
                          SELECT FROM lock_tickets AS o
                          WHERE o.name = try_acquire.name AND o.number > last_served AND o.number < try_acquire.ticket
                      );
                END IF;
                IF NOT FOUND THEN
                    granted := false;
                    remaining := 0;
                    waiting := true;
                    RETURN;
                END IF;
            END IF;
            IF has_expired THEN
                PERFORM record_grant_end(try_acquire.name, 'expired');
            END IF;
            IF try_acquire.durable THEN
                -- Hot path: commit_durably() inlined.
                IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
                    ignored := set_config('synchronous_commit', 'on', true);
                END IF;
                LOOP
                    IF minted_start = pg_postmaster_start_time() THEN
                        minted := pg_catalog.nextval('token_sequence'::pg_catalog.regclass);
                        -- Read after minting: if the server was frozen in between, discard it.
                        moment := clock_timestamp();
                        EXIT WHEN minted > last_token AND minted >= date_part('epoch', moment) * 1000000 - 1000000;
                    END IF;
                    minted_start := catch_up_tokens(last_token, minted_start);
                END LOOP;
            ELSE
                minted := -1 - floor(random() * (1::bigint << 52))::bigint;
                moment := clock_timestamp();
            END IF;
            UPDATE distributed_locks AS l
            SET token = minted,
                minted_server_start = minted_start,
                attempt = try_acquire.attempt,
                holder = try_acquire.holder,
                meta = try_acquire.meta,
                presence = try_acquire.presence,
                last_served_ticket = coalesce(try_acquire.ticket, l.last_served_ticket),
                granted_at = moment,
                released_at = NULL,
                forced_at = NULL,
                ttl = seconds * interval '1 second',
                expires_at = moment + seconds * interval '1 second'
            WHERE l.ctid = version
            RETURNING true, l.token, l.expires_at, seconds, false
            INTO granted, token, expires_at, remaining, waiting;
            RETURN;
        END IF;

        SELECT l.token, l.attempt, l.expires_at, l.waiting, l.presence, l.kind,
               -- Subtract numbers: Postgres before 17 cannot subtract from an infinite timestamp.
               date_part('epoch', l.expires_at) - date_part('epoch', clock_timestamp()) AS remaining
        INTO seen
        FROM distributed_locks AS l WHERE l.name = try_acquire.name;
        IF NOT FOUND THEN
            -- The INSERT waits for another session that has inserted the same row and not yet
            -- committed. After a moment the lock is not granted instead.
            ready := check_request(try_acquire.name, try_acquire.ttl);
            patience := current_setting('lock_timeout');
            BEGIN
                ignored := set_config('lock_timeout', '10ms', true);
                INSERT INTO distributed_locks (name, token, expires_at)
                VALUES (try_acquire.name, 0, '-infinity')
                ON CONFLICT DO NOTHING;
                ignored := set_config('lock_timeout', patience, true);
            EXCEPTION WHEN lock_not_available THEN
                granted := false;
                remaining := 0;
                waiting := false;
                RETURN;
            END;
            CONTINUE;
        END IF;
        IF seen.kind IS NOT NULL THEN
            ready := refuse_kind(try_acquire.name, 'a plain lock');
        END IF;

        remaining := greatest(seen.remaining, 0);
        granted := coalesce(remaining > 0 AND seen.attempt = try_acquire.attempt, false);
        waiting := remaining = 0 AND seen.waiting AND try_acquire.fair AND try_acquire.ticket IS NULL;
        alone := try_acquire.attempt IS NOT NULL
            OR statement_timestamp() < transaction_timestamp() + interval '100 microseconds';
        IF looked THEN
            -- The second look decides.
        ELSIF waiting THEN
            -- Free and reserved for its queue, unless no client in the queue is alive.
            IF alone THEN
                looked := NOT first_is_alive(try_acquire.name);
            ELSE
                looked := NOT EXISTS (
                    SELECT FROM lock_tickets AS t JOIN lock_clients AS c ON c.client = t.client
                    WHERE t.name = try_acquire.name AND c.seen_until > clock_timestamp()
                );
            END IF;
            CONTINUE WHEN looked AND queue_is_empty(try_acquire.name);
        ELSIF remaining = 0 THEN
            -- Freed after the first query, or free and locked by another transaction.
            looked := true;
            CONTINUE;
        ELSIF NOT granted AND seen.presence IS NOT NULL AND alone
            AND (
                try_acquire.attempt IS NOT NULL OR NOT seen.waiting OR NOT EXISTS (
                    SELECT FROM lock_tickets AS t JOIN lock_clients AS c ON c.client = t.client
                    WHERE t.name = try_acquire.name AND c.seen_until > clock_timestamp()
                )
            )
        THEN
            grace := remaining_grace(seen.presence, true, true);
            IF grace <= 0 THEN
                PERFORM free_dead_holder(try_acquire.name, seen.token, seen.presence);
                looked := true;
                CONTINUE;
            END IF;
            remaining := least(remaining, grace);
        END IF;

        token := CASE WHEN granted THEN seen.token END;
        expires_at := CASE WHEN seen.remaining > 0 THEN seen.expires_at END;
        IF granted AND try_acquire.durable THEN
            -- The first call may have been interrupted before its commit was durable. This write
            -- makes the retry wait for a durable commit of its own.
            ready := commit_durably();
            UPDATE distributed_locks AS l SET attempt = l.attempt
            WHERE l.name = try_acquire.name AND l.token = seen.token;
        END IF;
        RETURN;
    END LOOP;
END
$$;
