-- Grants the lock if it is this caller's turn, else leaves a ticket: a place in line, first come, first served. Call it again,
-- with the same `attempt`, when the client's channel says so; see docs/reference/sql.md.
--
-- `attempt` names the request and with it the ticket: sent again after a lost answer it finds its own place. `client` names
-- the process that waits, which must let itself be heard every second (heartbeat), or its places go. `had_ticket` is for
-- whoever asks again: those ahead who are dead are then passed over.
--
-- The ticket is left with the line held, after a look at whether the lock is free. Whoever frees a lock that others wait for
-- needs the line too, and so either came before, and is seen here; or comes after, and sees the ticket. Where nobody waits
-- yet, the lock's row is held as well, to say that somebody does. So no wake-up can be lost between. Tickets are numbered
-- with the line held: their order is the order of arrival. Whoever redeems a ticket does not need the line, so that others
-- can line up while the grant reaches the disk. A grant is made by try_acquire, the one place where tokens are minted.
--
-- It waits for another transaction at work on the lock, but not for long: `remaining` is then 0 and there is no ticket yet.
-- `fresh` means that the ticket is a new one; `first` that nobody alive is known to be ahead; `watched` that the holder's
-- presence is known, so that looking in is worth it.
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
    patience text := current_setting('lock_timeout');
    line bigint := hashtextextended(current_schema() || acquire.name, 1);
    seen record;
    free boolean;
    at_once boolean;
    answer record;
    grace double precision;
    ignored text;
BEGIN
    IF octet_length(acquire.name) BETWEEN 1 AND 512 AND date_part('epoch', acquire.ttl) BETWEEN 0.1 AND 86400
        AND octet_length(acquire.holder) <= 512 AND acquire.meta IS NULL
    THEN
        -- The usual, without the cost of a call.
    ELSE
        ready := check_request(acquire.name, acquire.ttl, acquire.holder, acquire.meta);
    END IF;
    IF acquire.attempt IS NULL OR acquire.client IS NULL THEN
        RAISE EXCEPTION 'To wait in line for lock % takes an attempt and a client.', quote_literal(acquire.name)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF alone THEN
        -- A lost ticket costs no more than a new one; a grant asks for more below.
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;

    -- The line, held from here on; and the row, where nobody waits yet.
    at_once := pg_try_advisory_xact_lock(line);
    IF at_once THEN
        SELECT l.token, l.attempt, l.presence, l.expires_at, l.waiting INTO seen
        FROM distributed_locks AS l WHERE l.name = acquire.name;
        at_once := FOUND AND seen.waiting;
    END IF;
    IF NOT at_once THEN
        BEGIN
            ignored := set_config('lock_timeout', '200ms', true);
            PERFORM pg_advisory_xact_lock(line);
            LOOP
                SELECT l.token, l.attempt, l.presence, l.expires_at, l.waiting INTO seen
                FROM distributed_locks AS l WHERE l.name = acquire.name;
                IF FOUND AND NOT seen.waiting THEN
                    SELECT l.token, l.attempt, l.presence, l.expires_at, l.waiting INTO seen
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

    free := seen.expires_at <= clock_timestamp();
    IF NOT free AND seen.presence IS NOT NULL AND seen.attempt IS DISTINCT FROM acquire.attempt
        AND (acquire.had_ticket OR NOT seen.waiting)
    THEN
        grace := remaining_grace(seen.presence, true);
        IF grace <= 0 THEN
            free := free_dead_holder(acquire.name, seen.token, seen.presence);
        END IF;
    END IF;
    first := true;
    IF free AND seen.waiting THEN
        SELECT t.attempt = acquire.attempt INTO first
        FROM lock_tickets AS t WHERE t.name = acquire.name ORDER BY t.number LIMIT 1;
        IF NOT first AND acquire.had_ticket THEN
            -- Whoever lines up need not know whether those ahead are alive; who has waited must.
            SELECT f.attempt = acquire.attempt INTO first FROM first_in_queue(acquire.name, true) AS f;
        END IF;
        first := coalesce(first, true);
    END IF;
    IF (free AND (first OR NOT acquire.fair)) OR (NOT free AND seen.attempt = acquire.attempt) THEN
        answer := try_acquire(
            acquire.name, acquire.ttl, acquire.holder, acquire.meta, acquire.attempt, acquire.durable,
            presence => acquire.presence, fair => false
        );
        IF answer.granted THEN
            DELETE FROM lock_tickets AS t WHERE t.attempt = acquire.attempt AND t.name = acquire.name;
            granted := true;
            token := answer.token;
            expires_at := answer.expires_at;
            remaining := answer.remaining;
            RETURN;
        END IF;
        IF alone THEN
            ignored := set_config('synchronous_commit', 'off', true);
        END IF;
    END IF;

    INSERT INTO lock_tickets AS t (name, number, attempt, client, presence, holder, since)
    SELECT acquire.name,
           -- Read here, for a ticket may have been redeemed since.
           1 + greatest((SELECT l.last_served_ticket FROM distributed_locks AS l WHERE l.name = acquire.name), max(o.number)),
           acquire.attempt, acquire.client, acquire.presence, coalesce(acquire.holder, describe_session()), clock_timestamp()
    FROM lock_tickets AS o WHERE o.name = acquire.name
    -- Its own, after a lost answer. Or, in a transaction that does not see what came before it, another's: that fails, and
    -- is sent again.
    ON CONFLICT DO NOTHING
    RETURNING t.number INTO ticket;
    fresh := FOUND;
    IF NOT fresh THEN
        -- A presence that has come since it lined up makes it known when it dies.
        UPDATE lock_tickets AS t SET presence = coalesce(acquire.presence, t.presence)
        WHERE t.attempt = acquire.attempt AND t.name = acquire.name
        RETURNING t.number INTO ticket;
    END IF;
    IF seen.waiting THEN
        -- Whether somebody alive is ahead is not worth the time here; who waits will know within a second.
        first := free AND first;
    ELSE
        UPDATE distributed_locks AS l SET waiting = true WHERE l.name = acquire.name;
    END IF;
    IF NOT EXISTS (
        SELECT FROM lock_clients AS c
        WHERE c.client = acquire.client AND c.seen_until > clock_timestamp() + interval '2 seconds'
    ) THEN
        PERFORM touch_client(acquire.client);
    END IF;
    granted := false;
    expires_at := CASE WHEN seen.expires_at > clock_timestamp() THEN seen.expires_at END;
    -- Subtracted as numbers: Postgres before 17 refuses to subtract from an infinite time.
    remaining := greatest(
        date_part('epoch', seen.expires_at) - date_part('epoch', clock_timestamp()), 0
    );
    IF grace > 0 THEN
        remaining := least(remaining, grace);
    END IF;
    watched := seen.presence IS NOT NULL AND seen.expires_at > clock_timestamp();
END
$$;

-- Lets a client that waits be heard, and tells what has come of its places in line for these locks.
--
-- `tickets` is how many tickets it has in all: fewer than it knows of means that some were passed over. `firsts` has
-- the attempts that are first in line, and for each of them `next_check` has the seconds after which there may be
-- something to see: 0 for one whose lock is free.
CREATE OR REPLACE FUNCTION heartbeat(
    client uuid,
    names text[],
    OUT tickets bigint,
    OUT firsts uuid[],
    OUT next_check double precision[],
    OUT watched boolean[]
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    asked text;
    seen record;
    next record;
    wait double precision;
    grace double precision;
    ignored text;
BEGIN
    IF heartbeat.client IS NULL THEN
        RAISE EXCEPTION 'To look in line takes a client.' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_current_xact_id_if_assigned() IS NULL THEN
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    PERFORM touch_client(heartbeat.client);
    SELECT count(*) INTO tickets FROM lock_tickets AS t WHERE t.client = heartbeat.client;
    FOREACH asked IN ARRAY coalesce(names, '{}') LOOP
        SELECT l.expires_at, l.presence, l.token INTO seen FROM distributed_locks AS l WHERE l.name = asked;
        CONTINUE WHEN NOT FOUND;
        next := first_in_queue(asked, false);
        CONTINUE WHEN next.client IS DISTINCT FROM heartbeat.client;
        wait := greatest(
            date_part('epoch', seen.expires_at) - date_part('epoch', clock_timestamp()),
            0
        );
        grace := CASE WHEN wait > 0 AND seen.presence IS NOT NULL THEN remaining_grace(seen.presence, false) END;
        firsts := firsts || next.attempt;
        next_check := next_check || greatest(least(wait, grace), 0);
        watched := watched || (wait > 0 AND seen.presence IS NOT NULL);
    END LOOP;
END
$$;

-- Makes this session a presence: for as long as it lasts, the process behind it is there. When it ends, others take the
-- locks that are tied to it after `grace`, unless withdraw_presence() has said before that there is nothing to conclude from it. A
-- new name for each session.
CREATE OR REPLACE FUNCTION register_presence(presence uuid, grace interval) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    advisory_key bigint := ('x' || left(md5(gen_random_uuid()::text), 16))::bit(64)::bigint;
    ignored text;
BEGIN
    IF register_presence.presence IS NULL OR (date_part('epoch', register_presence.grace) BETWEEN 0.01 AND 86400) IS NOT TRUE THEN
        -- A longer one would be added to the time by others, who are not to fail by it.
        RAISE EXCEPTION 'A presence takes a name and a grace of 10 ms to 24 h; got % and %.',
            coalesce(register_presence.presence::text, 'none'), coalesce(register_presence.grace::text, 'none')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_current_xact_id_if_assigned() IS NULL THEN
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    PERFORM pg_advisory_lock(advisory_key);
    INSERT INTO lock_presence (presence, advisory_key, session, incarnation, grace)
    VALUES (register_presence.presence, advisory_key, pg_backend_pid(), pg_postmaster_start_time(), register_presence.grace)
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        PERFORM pg_advisory_unlock(advisory_key);
        RAISE EXCEPTION 'Presence % is there already. Take a new name for each session.', register_presence.presence
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;

-- Says that the process is there though its presence is gone: from here on the time of its leases alone decides. `lost` has
-- the places (from 1) of those grants that are not held any more: whoever was about to take them has.
CREATE OR REPLACE FUNCTION withdraw_presence(presence uuid, names text[], tokens bigint[], OUT lost integer[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ignored text;
BEGIN
    IF pg_current_xact_id_if_assigned() IS NULL THEN
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    DELETE FROM lock_presence AS p WHERE p.presence = withdraw_presence.presence;
    SELECT array_agg(a.position::integer ORDER BY a.position) INTO lost
    FROM unnest(names, tokens) WITH ORDINALITY AS a (name, token, position)
    WHERE NOT EXISTS (
        SELECT FROM distributed_locks AS l
        WHERE l.name = a.name AND l.token = a.token AND l.expires_at > clock_timestamp()
    );
END
$$;

-- Ends a client: its places in line go, all or those that it does not know of, and its presence. What it holds is its
-- to release.
CREATE OR REPLACE FUNCTION leave_queue(client uuid, presence uuid DEFAULT NULL, keep uuid[] DEFAULT '{}') RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    one text;
    ignored text;
BEGIN
    IF pg_current_xact_id_if_assigned() IS NULL THEN
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    FOR one IN SELECT DISTINCT t.name FROM lock_tickets AS t WHERE t.client = leave_queue.client ORDER BY t.name LOOP
        PERFORM lock_queue(one, true);
        DELETE FROM lock_tickets AS t
        WHERE t.client = leave_queue.client AND t.name = one AND t.attempt <> ALL (leave_queue.keep)
          -- Who has lined up while this was on its way could not be named.
          AND (leave_queue.keep = '{}' OR t.since < clock_timestamp() - interval '3 seconds');
        IF FOUND THEN
            PERFORM wake_if_free(one);
        END IF;
    END LOOP;
    IF leave_queue.keep = '{}' THEN
        DELETE FROM lock_clients AS c WHERE c.client = leave_queue.client;
        DELETE FROM lock_presence AS p WHERE p.presence = leave_queue.presence;
    END IF;
END
$$;

-- Tells who waits for the lock, in order, as JSON; only those who are alive.
CREATE OR REPLACE FUNCTION queue(name text) RETURNS json
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT coalesce(
        json_agg(json_build_object('holder', t.holder, 'since', extract(epoch FROM t.since)) ORDER BY t.number), '[]'
    )
    FROM lock_tickets AS t
    JOIN lock_clients AS c ON c.client = t.client AND c.seen_until > clock_timestamp()
    WHERE t.name = queue.name
$$;
