-- Grants the lock if nobody holds it. Waits neither for a holder nor for another transaction that is at work on the
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
-- already made rather than a stranger in possession. With `sent_before` it waits for whoever is at work on the row, for
-- that may be the first sending, not yet committed.
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
    sent_before boolean DEFAULT false,
    OUT granted boolean,
    OUT token bigint,
    OUT expires_at timestamptz,
    OUT remaining double precision
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
    -- In seconds alone: a day or a month of the calendar may be longer or shorter than it looks.
    lasting interval;
    recorded bigint;
    looks integer := 0;
    seeding boolean;
    moment timestamptz;
    seen record;
    ignored text;
BEGIN
    IF octet_length(try_acquire.name) BETWEEN 1 AND 512 AND try_acquire.ttl BETWEEN '100 milliseconds' AND '24 hours'
        AND octet_length(try_acquire.holder) <= 512 AND try_acquire.meta IS NULL
    THEN
        -- The usual, without the cost of a call.
    ELSE
        ready := check_request(try_acquire.name, try_acquire.ttl, try_acquire.holder, try_acquire.meta);
    END IF;
    lasting := make_interval(secs => extract(epoch FROM try_acquire.ttl)::double precision);
    IF try_acquire.durable THEN
        ready := commit_durably();
    ELSIF pg_current_xact_id_if_assigned() IS NULL THEN
        -- Only where nothing was written before in this transaction, which may be waiting for the disk on purpose.
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    IF try_acquire.sent_before THEN
        seeding := pg_advisory_xact_lock(hashtextextended(quote_ident(current_schema()) || try_acquire.name, 0)) IS NULL;
        PERFORM 1 FROM distributed_locks AS l WHERE l.name = try_acquire.name FOR KEY SHARE;
    END IF;
    LOOP
        SELECT t.timeline INTO recorded
        FROM distributed_locks AS l CROSS JOIN token_timeline AS t
        WHERE l.name = try_acquire.name AND l.expires_at <= clock_timestamp()
        FOR UPDATE OF l SKIP LOCKED;  -- the strongest, so that not even a proof's shared lock is passed over
        IF FOUND THEN
            IF try_acquire.durable AND recorded <> current_timeline() THEN
                PERFORM enter_timeline();
            END IF;
            moment := clock_timestamp();
            UPDATE distributed_locks AS l
            SET token = CASE
                    WHEN try_acquire.durable THEN pg_catalog.nextval('token_sequence'::pg_catalog.regclass)
                    ELSE -1 - floor(random() * (1::bigint << 52))::bigint
                END,
                attempt = try_acquire.attempt,
                holder = coalesce(try_acquire.holder, describe_session()),
                meta = try_acquire.meta,
                granted_at = moment,
                released_at = NULL,
                ttl = lasting,
                expires_at = moment + lasting
            WHERE l.name = try_acquire.name
            RETURNING true, l.token, l.expires_at, extract(epoch FROM lasting)
            INTO granted, token, expires_at, remaining;
            RETURN;
        END IF;

        SELECT l.token, l.attempt, l.expires_at,
               -- Subtracted as numbers: Postgres before 17 refuses to subtract from an infinite time.
               extract(epoch FROM l.expires_at)::double precision
               - extract(epoch FROM clock_timestamp())::double precision AS remaining
        INTO seen
        FROM distributed_locks AS l WHERE l.name = try_acquire.name;
        IF NOT FOUND THEN
            -- Two who made the same row would wait for each other's end; the second is sent away instead.
            IF NOT pg_try_advisory_xact_lock(hashtextextended(quote_ident(current_schema()) || try_acquire.name, 0)) THEN
                granted := false;
                remaining := 0;
                RETURN;
            END IF;
            INSERT INTO distributed_locks (name, token, expires_at)
            VALUES (try_acquire.name, 0, '-infinity')
            ON CONFLICT DO NOTHING;
        ELSIF seen.remaining > 0 OR looks > 0 THEN
            granted := coalesce(seen.remaining > 0 AND seen.attempt = try_acquire.attempt, false);
            token := CASE WHEN granted THEN seen.token END;
            expires_at := seen.expires_at;
            remaining := greatest(seen.remaining, 0);
            IF granted AND try_acquire.durable THEN
                -- The first sending may have been cut off before its commit was safe; this one waits for its own.
                UPDATE distributed_locks AS l SET attempt = l.attempt
                WHERE l.name = try_acquire.name AND l.token = seen.token;
            END IF;
            RETURN;
        ELSE
            looks := 1;
        END IF;
        -- Seeded just now, or freed between the two looks, or free and in another's hands: look again, once.
    END LOOP;
END
$$;
