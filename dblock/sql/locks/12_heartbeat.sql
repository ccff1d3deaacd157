-- Reports that a waiting client is alive, and returns the state of its tickets for these locks.
--
-- `tickets` is how many tickets the client has in all. If it is fewer than the client expects, some
-- were pruned. `firsts` has the attempts that are first in their queue. For each of them
-- `next_check` has the seconds until something may change (0: the lock is free), and `watched`
-- whether the holder has a presence. For a shared lock see look_at_shared_queue(). The client's
-- waiters at barriers and latches count as tickets, whatever the names are. One whose wait is over
-- is in `firsts`, with a `next_check` of 0.
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
    ready boolean;
BEGIN
    IF heartbeat.client IS NULL THEN
        RAISE EXCEPTION 'heartbeat needs a client.' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    ready := commit_asynchronously();
    PERFORM touch_client(heartbeat.client);
    SELECT count(*) INTO tickets FROM lock_tickets AS t WHERE t.client = heartbeat.client;
    FOR seen IN
        SELECT w.attempt, w.over OR EXISTS (
            SELECT FROM latches AS l WHERE w.kind = 'latch' AND l.name = w.name AND l.remaining = 0
        ) AS over
        FROM barrier_waiters AS w WHERE w.client = heartbeat.client
    LOOP
        tickets := tickets + 1;
        IF seen.over THEN
            firsts := firsts || seen.attempt;
            next_check := next_check || 0::double precision;
            watched := watched || false;
        END IF;
    END LOOP;
    FOREACH asked IN ARRAY coalesce(names, '{}') LOOP
        SELECT l.expires_at, l.presence, l.kind INTO seen FROM distributed_locks AS l WHERE l.name = asked;
        CONTINUE WHEN NOT FOUND;
        IF seen.kind IS NOT NULL THEN
            FOR next IN SELECT q.* FROM look_at_shared_queue(asked, heartbeat.client) AS q LOOP
                firsts := firsts || next.attempt;
                next_check := next_check || next.next_check;
                watched := watched || next.watched;
            END LOOP;
            CONTINUE;
        END IF;
        next := first_in_queue(asked, false);
        CONTINUE WHEN next.client IS DISTINCT FROM heartbeat.client;
        wait := greatest(
            date_part('epoch', seen.expires_at) - date_part('epoch', clock_timestamp()),
            0
        );
        grace := CASE WHEN wait > 0 AND seen.presence IS NOT NULL THEN remaining_grace(seen.presence, false, true) END;
        firsts := firsts || next.attempt;
        next_check := next_check || greatest(least(wait, grace), 0);
        watched := watched || (wait > 0 AND seen.presence IS NOT NULL);
    END LOOP;
END
$$;
