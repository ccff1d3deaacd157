-- Grants one of several locks to an attempt: the first in the order of `names` that is free for it.
-- `name` is the lock that was granted. Otherwise the call leaves a ticket in the queue of each
-- lock, and `name` is NULL. Call it again with the same `attempt` and `had_tickets` when a
-- notification arrives on the client's channel. Without a `client` it is a try and leaves no
-- ticket.
--
-- An attempt is granted at most one of the locks, even if its reply was lost and it asks again. The
-- queue of the first name in sorted order guards that: two calls of one attempt never decide at the
-- same time, and the later one finds the grant of the earlier one. With the grant, in the same
-- transaction, the call deletes the attempt's tickets for the other locks. `left_queues` is their
-- number. If it is not 0, call abandon_all() with `only_tickets` afterwards: it wakes the next
-- waiters of these locks, which a durable commit cannot do.
--
-- The queues are locked in sorted order, so that callers with the same names in another order do
-- not wait for each other. A queue that another transaction keeps locked is passed over. The five
-- arrays have an item for each name: `tickets` is NULL where no ticket could be left, and the
-- others are what acquire() returns. `busy` means that at least one name was passed over: ask again
-- a little later.
CREATE OR REPLACE FUNCTION acquire_any(
    names text[],
    ttl interval DEFAULT '30 seconds',
    holder text DEFAULT NULL,
    meta jsonb DEFAULT NULL,
    attempt uuid DEFAULT NULL,
    client uuid DEFAULT NULL,
    presence uuid DEFAULT NULL,
    had_tickets boolean DEFAULT false,
    wait boolean DEFAULT true,
    retry boolean DEFAULT false,
    OUT name text,
    OUT token bigint,
    OUT expires_at timestamptz,
    OUT remaining double precision,
    OUT left_queues integer,
    OUT busy boolean,
    OUT tickets bigint[],
    OUT remainings double precision[],
    OUT firsts boolean[],
    OUT watched boolean[],
    OUT fresh boolean[]
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
    alone boolean := pg_current_xact_id_if_assigned() IS NULL;
    milliseconds integer := CASE WHEN acquire_any.retry THEN 2000 WHEN acquire_any.wait THEN 20 ELSE 1 END;
    ignored text;
    one text;
    -- The names whose queue this transaction has locked.
    locked text[] := '{}';
    own text;
    reply record;
BEGIN
    ready := check_names(acquire_any.names, false);
    IF acquire_any.attempt IS NULL OR cardinality(acquire_any.names) = 0 THEN
        RAISE EXCEPTION 'acquire_any needs an attempt and at least one name.'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    ready := (
        SELECT bool_and(check_request(n.name, acquire_any.ttl, acquire_any.holder, acquire_any.meta))
        FROM unnest(acquire_any.names) AS n (name)
    );
    IF alone THEN
        -- A lost ticket only costs a new one. A grant below commits durably.
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    left_queues := 0;
    busy := false;
    FOR one IN SELECT n.name FROM unnest(acquire_any.names) AS n (name) ORDER BY n.name COLLATE "C" LOOP
        IF lock_queue(one, milliseconds) THEN
            locked := locked || one;
        ELSE
            busy := true;
            IF locked = '{}' THEN
                -- Another call of this attempt may be deciding.
                RETURN;
            END IF;
        END IF;
    END LOOP;

    SELECT l.name INTO own FROM distributed_locks AS l
    WHERE l.name = ANY (acquire_any.names) AND l.attempt = acquire_any.attempt AND l.expires_at > clock_timestamp();
    FOREACH one IN ARRAY CASE WHEN own IS NULL THEN acquire_any.names ELSE ARRAY[own] END LOOP
        -- A waiter with a ticket asks below.
        CONTINUE WHEN acquire_any.had_tickets AND own IS NULL;
        reply := try_acquire(
            one, acquire_any.ttl, acquire_any.holder, acquire_any.meta, acquire_any.attempt,
            presence => acquire_any.presence
        );
        IF reply.granted THEN
            name := one;
            EXIT;
        END IF;
        remaining := least(
            remaining, CASE WHEN reply.waiting THEN greatest(reply.remaining, 0.001) ELSE reply.remaining END
        );
    END LOOP;

    IF name IS NULL AND acquire_any.client IS NOT NULL THEN
        IF alone THEN
            ignored := set_config('synchronous_commit', 'off', true);
        END IF;
        FOREACH one IN ARRAY acquire_any.names LOOP
            IF one = ANY (locked) THEN
                reply := acquire(
                    one, acquire_any.ttl, acquire_any.holder, acquire_any.meta, acquire_any.attempt,
                    acquire_any.client, presence => acquire_any.presence, had_ticket => acquire_any.had_tickets,
                    wait => acquire_any.wait
                );
                IF reply.granted THEN
                    name := one;
                    EXIT;
                END IF;
                busy := busy OR reply.ticket IS NULL;
                tickets := tickets || reply.ticket;
                remainings := remainings || reply.remaining;
                firsts := firsts || reply.first;
                watched := watched || reply.watched;
                fresh := fresh || reply.fresh;
            ELSE
                tickets := tickets || NULL::bigint;
                remainings := remainings || 0::double precision;
                firsts := firsts || false;
                watched := watched || false;
                fresh := fresh || false;
            END IF;
        END LOOP;
    END IF;
    IF name IS NOT NULL THEN
        token := reply.token;
        expires_at := reply.expires_at;
        remaining := reply.remaining;
        DELETE FROM lock_tickets AS t WHERE t.attempt = acquire_any.attempt AND t.name = ANY (acquire_any.names);
        GET DIAGNOSTICS left_queues = ROW_COUNT;
    END IF;
END
$$;
