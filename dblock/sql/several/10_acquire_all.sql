-- Grants several locks to one attempt, in the order of their names.
--
-- Without a `client` it is a try: all the locks are granted in this transaction, or none of them.
-- With a `client` it grants the first names for as long as it can, and leaves a ticket in the queue
-- of the first lock that it cannot grant. `tokens`, `deadlines` and `lasting` (the seconds of each
-- grant) then have as many items as locks were granted. The caller holds these, waits for the next
-- lock as a caller of acquire() does, and calls again with the names that are left. `redeem` is the
-- number of its ticket for the first of them.
--
-- Every caller takes the locks in one common order, so callers of this function alone cannot wait
-- for each other in a cycle. A caller of acquire() may hold one of the later locks and wait for an
-- earlier one. So the caller names the locks that it `held` before. `cycle` is the position (from
-- 1, in `held` and then in `names`) of a lock that such a caller, the attempt `waiter`, waits for
-- while this caller waits for that one. The caller then gives up the lock at that position and all
-- later ones (give_way), and asks for them again. A cycle is found if the attempts of each thread
-- or task have the same first eight bytes. Other callers may have other attempts, so `wanted` is
-- the position of the first lock that a caller of acquire() waits for at all. A caller that has
-- waited for long gives up the locks from there on. `ordered` says that the caller's thread or task
-- holds no lock whose name comes after: other callers then give up nothing for its ticket. `places`
-- has for each name the number of a ticket that the caller has given up with give_way(), or NULL: a
-- new ticket for that lock gets the same position.
--
-- Only try_acquire() grants, because it is the one place where tokens are minted. The same
-- `attempt` finds the grants and the ticket that an earlier call has made. With `retry` the call
-- waits for a transaction that has locked a row, because that may be the earlier call, not yet
-- committed. `refused` is the position of the lock that the call did not grant, NULL if it granted
-- all. `remaining`, `ticket`, `first`, `watched` and `fresh` are those of acquire() for that lock.
CREATE OR REPLACE FUNCTION acquire_all(
    names text[],
    ttl interval DEFAULT '30 seconds',
    holder text DEFAULT NULL,
    meta jsonb DEFAULT NULL,
    attempt uuid DEFAULT NULL,
    client uuid DEFAULT NULL,
    presence uuid DEFAULT NULL,
    redeem bigint DEFAULT NULL,
    held text[] DEFAULT '{}',
    ordered boolean DEFAULT false,
    places bigint[] DEFAULT '{}',
    wait boolean DEFAULT true,
    retry boolean DEFAULT false,
    OUT tokens bigint[],
    OUT deadlines timestamptz[],
    OUT lasting double precision[],
    OUT refused integer,
    OUT remaining double precision,
    OUT ticket bigint,
    OUT first boolean,
    OUT watched boolean,
    OUT fresh boolean,
    OUT cycle integer,
    OUT waiter uuid,
    OUT wanted integer
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
    one text;
    reply record;
    queued record;
BEGIN
    ready := check_names(acquire_all.names, true);
    IF acquire_all.attempt IS NULL THEN
        RAISE EXCEPTION 'acquire_all needs an attempt.' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    tokens := '{}';
    deadlines := '{}';
    lasting := '{}';
    IF acquire_all.client IS NULL THEN
        BEGIN
            FOREACH one IN ARRAY acquire_all.names LOOP
                reply := try_acquire(
                    one, acquire_all.ttl, acquire_all.holder, acquire_all.meta, acquire_all.attempt,
                    retry => acquire_all.retry, presence => acquire_all.presence
                );
                IF NOT reply.granted THEN
                    RAISE EXCEPTION 'not granted' USING ERRCODE = 'DBL20';
                END IF;
                tokens := tokens || reply.token;
                deadlines := deadlines || reply.expires_at;
                lasting := lasting || reply.remaining;
            END LOOP;
        EXCEPTION WHEN SQLSTATE 'DBL20' THEN
            -- The grants before are undone. Their tokens were seen by no caller.
            refused := cardinality(tokens) + 1;
            tokens := '{}';
            deadlines := '{}';
            lasting := '{}';
            -- A lock that is free but reserved for its queue is busy for longer than a moment.
            remaining := CASE WHEN reply.waiting THEN greatest(reply.remaining, 0.001) ELSE reply.remaining END;
        END;
        RETURN;
    END IF;

    FOREACH one IN ARRAY acquire_all.names LOOP
        reply := try_acquire(
            one, acquire_all.ttl, acquire_all.holder, acquire_all.meta, acquire_all.attempt,
            presence => acquire_all.presence, ticket => acquire_all.redeem
        );
        IF NOT reply.granted THEN
            queued := acquire(
                one, acquire_all.ttl, acquire_all.holder, acquire_all.meta, acquire_all.attempt, acquire_all.client,
                presence => acquire_all.presence, had_ticket => acquire_all.redeem IS NOT NULL, wait => acquire_all.wait
            );
            IF NOT queued.granted THEN
                refused := cardinality(tokens) + 1;
                remaining := queued.remaining;
                ticket := queued.ticket;
                first := queued.first;
                watched := queued.watched;
                fresh := queued.fresh;
                IF fresh THEN
                    -- The queue is locked, so no other transaction takes that number.
                    UPDATE lock_tickets AS t
                    SET ordered = coalesce(acquire_all.ordered, false), number = coalesce(
                        (SELECT p FROM unnest(ARRAY[acquire_all.places[refused]]) AS p
                         -- A number above would be issued again: the queue may have begun again.
                         WHERE p > 0 AND p < t.number
                           AND NOT EXISTS (SELECT FROM lock_tickets AS o WHERE o.name = one AND o.number = p)),
                        t.number
                    )
                    WHERE t.attempt = acquire_all.attempt AND t.name = one
                    RETURNING t.number INTO ticket;
                END IF;
                acquire_all.held := acquire_all.held || acquire_all.names[1:cardinality(tokens)];
                IF acquire_all.held <> '{}' THEN
                    wanted := first_wanted(acquire_all.held, acquire_all.attempt);
                    SELECT array_position(acquire_all.held, c.lock), c.waiter INTO cycle, waiter
                    FROM lock_in_cycle(one, acquire_all.attempt) AS c;
                END IF;
                RETURN;
            END IF;
            tokens := tokens || queued.token;
            deadlines := deadlines || queued.expires_at;
            lasting := lasting || queued.remaining;
        ELSE
            tokens := tokens || reply.token;
            deadlines := deadlines || reply.expires_at;
            lasting := lasting || reply.remaining;
        END IF;
        acquire_all.redeem := NULL;
    END LOOP;
END
$$;
