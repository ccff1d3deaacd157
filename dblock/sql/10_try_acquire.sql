-- Grants the lock if nobody holds it and nobody waits for it in line. Waits neither for a holder nor for another transaction that is at work on the
-- lock's row (granting it, releasing it, relying on it): the lock is then simply not to be had at this moment, and
-- `remaining` says 0.
--
-- The token is minted while the lock's row is held, after the last look at it, so that the
-- order of tokens is the order of grants. A row is never born granted: it is seeded free and
-- then granted like any other. (Minting in the INSERT would let a session that was
-- overtaken between minting and inserting be granted an older token than its predecessor's.)
-- Losing takes no row lock, so a crowd of losers does not hold up the holder's renewal.
--
-- `attempt` names this request. Sent again after its answer was lost, it finds the grant it
-- already made rather than a stranger in possession. With `retry` it waits for whoever is at work on the row, for
-- that may be the first sending, not yet committed.
--
-- A holder whose process is known to be gone (see remaining_grace) holds nothing. `presence` says by which session that can be
-- known of this caller; without it the lease's time alone decides. Only a call with an `attempt` looks for that, and for
-- whether those in line are alive: what it finds and notes should be committed at once.
--
-- With `fair => false` it takes a free lock before those who wait in line. With a `ticket`, which acquire() gave to the
-- same attempt, it redeems it if nobody is ahead. `waiting` in the answer means that the lock is free, and kept for others.
--
-- With `durable => false` the grant is not waited for to reach the disk, and so carries no fencing token: `token` is then
-- a negative number of no order, to renew and release with.
--
-- `remaining` is the time left in seconds: of this grant, or of the holder's in the way. It is there
-- so that no client compares `expires_at` with a clock of its own.
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
    -- In seconds alone: a day or a month of the calendar may be longer or shorter than it looks.
    lasting interval;
    seconds double precision;
    -- Where the lock's last token was minted: by which start of a server, and on which timeline, as WAL files are named.
    started timestamptz;
    timeline text;
    passed bigint;
    -- Whether the last holder let its lease run out.
    ran_out boolean;
    looks integer := 0;
    seeding boolean;
    moment timestamptz;
    seen record;
    -- Whether others in line come first.
    in_line boolean := try_acquire.fair AND try_acquire.ticket IS NULL;
    grace double precision;
    ignored text;
BEGIN
    IF octet_length(try_acquire.name) BETWEEN 1 AND 512 AND date_part('epoch', try_acquire.ttl) BETWEEN 0.1 AND 86400
        AND octet_length(try_acquire.holder) <= 512 AND try_acquire.meta IS NULL
    THEN
        -- The usual, without the cost of a call.
    ELSE
        ready := check_request(try_acquire.name, try_acquire.ttl, try_acquire.holder, try_acquire.meta);
        IF try_acquire.holder IS NULL THEN
            try_acquire.holder := describe_session();
        END IF;
    END IF;
    seconds := date_part('epoch', try_acquire.ttl);
    lasting := make_interval(secs => seconds);
    IF try_acquire.durable THEN
        -- commit_durably(), without the cost of a call.
        IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
            ignored := set_config('synchronous_commit', 'on', true);
        END IF;
    ELSIF pg_current_xact_id_if_assigned() IS NULL THEN
        -- Only where nothing was written before in this transaction, which may be waiting for the disk on purpose.
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    IF try_acquire.retry THEN
        seeding := pg_advisory_xact_lock(hashtextextended(current_schema() || try_acquire.name, 0)) IS NULL;
        PERFORM 1 FROM distributed_locks AS l WHERE l.name = try_acquire.name FOR KEY SHARE;
    END IF;
    LOOP
        SELECT l.minted_server_start, l.minted_timeline, l.last_served_ticket, l.expires_at > '-infinity'
        INTO started, timeline, passed, ran_out
        FROM distributed_locks AS l
        WHERE l.name = try_acquire.name AND l.expires_at <= clock_timestamp() AND NOT (l.waiting AND in_line)
        FOR UPDATE SKIP LOCKED;  -- the strongest, so that not even a proof's shared lock is passed over
        IF FOUND THEN
            IF try_acquire.ticket IS NOT NULL THEN
                DELETE FROM lock_tickets AS t
                WHERE t.name = try_acquire.name AND t.number = try_acquire.ticket AND t.attempt = try_acquire.attempt
                  AND NOT EXISTS (
                      SELECT FROM lock_tickets AS o
                      WHERE o.name = try_acquire.name AND o.number > passed AND o.number < try_acquire.ticket
                  );
                IF NOT FOUND THEN
                    granted := false;
                    remaining := 0;
                    waiting := true;
                    RETURN;
                END IF;
            END IF;
            IF ran_out THEN
                PERFORM record_grant_end(try_acquire.name, 'expired');
            END IF;
            -- A server, once started, mints on one timeline alone. Where this lock's last token was minted by this one, the
            -- timeline was entered, and its record need not be read.
            IF try_acquire.durable AND (
                started = pg_postmaster_start_time() AND timeline = left(pg_walfile_name(pg_current_wal_lsn()), 8)
            ) IS NOT TRUE THEN
                IF (SELECT t.timeline <> current_timeline() FROM token_timeline AS t) THEN
                    PERFORM enter_timeline();
                END IF;
                started := pg_postmaster_start_time();
                timeline := left(pg_walfile_name(pg_current_wal_lsn()), 8);
            END IF;
            moment := clock_timestamp();
            UPDATE distributed_locks AS l
            SET token = CASE
                    WHEN try_acquire.durable THEN pg_catalog.nextval('token_sequence'::pg_catalog.regclass)
                    ELSE -1 - floor(random() * (1::bigint << 52))::bigint
                END,
                minted_server_start = started,
                minted_timeline = timeline,
                attempt = try_acquire.attempt,
                holder = try_acquire.holder,
                meta = try_acquire.meta,
                presence = try_acquire.presence,
                last_served_ticket = coalesce(try_acquire.ticket, l.last_served_ticket),
                granted_at = moment,
                released_at = NULL,
                forced_at = NULL,
                ttl = lasting,
                expires_at = moment + lasting
            WHERE l.name = try_acquire.name
            RETURNING true, l.token, l.expires_at, seconds, false
            INTO granted, token, expires_at, remaining, waiting;
            RETURN;
        END IF;

        SELECT l.token, l.attempt, l.expires_at, l.waiting, l.presence,
               -- Subtracted as numbers: Postgres before 17 refuses to subtract from an infinite time.
               date_part('epoch', l.expires_at) - date_part('epoch', clock_timestamp()) AS remaining
        INTO seen
        FROM distributed_locks AS l WHERE l.name = try_acquire.name;
        IF NOT FOUND THEN
            -- Two who made the same row would wait for each other's end; the second is sent away instead.
            IF NOT pg_try_advisory_xact_lock(hashtextextended(current_schema() || try_acquire.name, 0)) THEN
                granted := false;
                remaining := 0;
                waiting := false;
                RETURN;
            END IF;
            INSERT INTO distributed_locks (name, token, expires_at)
            VALUES (try_acquire.name, 0, '-infinity')
            ON CONFLICT DO NOTHING;
            CONTINUE;
        END IF;

        remaining := greatest(seen.remaining, 0);
        granted := coalesce(remaining > 0 AND seen.attempt = try_acquire.attempt, false);
        waiting := remaining = 0 AND seen.waiting AND in_line;
        looks := looks + 1;
        IF looks = 1 AND waiting THEN
            -- Free, and kept for those in line; unless none of them lives any more.
            IF try_acquire.attempt IS NOT NULL THEN
                CONTINUE WHEN queue_is_empty(try_acquire.name);
            END IF;
        ELSIF looks = 1 AND remaining = 0 THEN
            -- Freed between the two looks, or free and in another's hands.
            CONTINUE;
        ELSIF looks = 1 AND NOT granted AND seen.presence IS NOT NULL AND try_acquire.attempt IS NOT NULL THEN
            grace := remaining_grace(seen.presence, true);
            IF grace <= 0 THEN
                PERFORM free_dead_holder(try_acquire.name, seen.token, seen.presence);
                CONTINUE;
            END IF;
            remaining := least(remaining, grace);
        END IF;

        token := CASE WHEN granted THEN seen.token END;
        expires_at := CASE WHEN seen.remaining > 0 THEN seen.expires_at END;
        IF granted AND try_acquire.durable THEN
            -- The first sending may have been cut off before its commit was safe; this one waits for its own.
            UPDATE distributed_locks AS l SET attempt = l.attempt
            WHERE l.name = try_acquire.name AND l.token = seen.token;
        END IF;
        RETURN;
    END LOOP;
END
$$;
