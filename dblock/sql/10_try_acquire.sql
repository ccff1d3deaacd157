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
-- already made rather than a stranger in possession.
--
-- `remaining` is the time left in seconds: of this grant, or of the holder's in the way. It is there
-- so that no client compares `expires_at` with a clock of its own.
CREATE OR REPLACE FUNCTION try_acquire(
    name text,
    ttl interval DEFAULT '30 seconds',
    holder text DEFAULT NULL,
    meta jsonb DEFAULT NULL,
    attempt uuid DEFAULT NULL,
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
    lasting interval := make_interval(secs => extract(epoch FROM try_acquire.ttl));
    recorded bigint;
    looks integer := 0;
    moment timestamptz;
    seen record;
BEGIN
    ready := check_request(try_acquire.name, try_acquire.ttl, try_acquire.holder, try_acquire.meta)
        AND commit_durably();
    LOOP
        SELECT t.timeline INTO recorded
        FROM distributed_locks AS l CROSS JOIN token_timeline AS t
        WHERE l.name = try_acquire.name AND l.expires_at <= clock_timestamp()
        FOR NO KEY UPDATE OF l SKIP LOCKED;
        IF FOUND THEN
            IF recorded <> current_timeline() THEN
                PERFORM enter_timeline();
            END IF;
            moment := clock_timestamp();
            UPDATE distributed_locks AS l
            SET token = pg_catalog.nextval('token_sequence'::pg_catalog.regclass),
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
            INSERT INTO distributed_locks (name, token, expires_at)
            VALUES (try_acquire.name, 0, '-infinity')
            ON CONFLICT DO NOTHING;
        ELSIF seen.remaining > 0 OR looks > 0 THEN
            granted := coalesce(seen.remaining > 0 AND seen.attempt = try_acquire.attempt, false);
            token := CASE WHEN granted THEN seen.token END;
            expires_at := seen.expires_at;
            remaining := greatest(seen.remaining, 0);
            RETURN;
        ELSE
            looks := 1;
        END IF;
        -- Seeded just now, or freed between the two looks, or free and in another's hands: look again, once.
    END LOOP;
END
$$;
