-- Deletes the rows of locks that have been free for longer than `idle`, at most `batch` of them,
-- and returns how many it deleted. For the owner only.
--
-- It never deletes a live row: each row is locked and then checked again, and a row that another
-- transaction has locked (to grant it, for example) is skipped. It never lowers a token, because
-- the sequence does not depend on the rows. Any number of reapers may run at once. A lock with a
-- live waiter stays, and so does the head of a shared lock as long as a share has a row. The reaper
-- also deletes the records of clients that died long ago, their tickets, history that is older than
-- 30 days, and barriers and latches that are not used any more.
CREATE OR REPLACE FUNCTION reap(idle interval DEFAULT '1 day', batch integer DEFAULT 1000) RETURNS integer
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    deleted integer := 0;
    pruned boolean := false;
    seen record;
    queued text;
BEGIN
    IF idle IS NULL OR idle < '0 seconds' OR batch IS NULL OR batch < 1 THEN
        RAISE EXCEPTION 'reap needs an idle time of 0 seconds or more and a batch of at least 1; got % and %.',
            idle, batch
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    DELETE FROM lock_tickets AS t
    WHERE NOT EXISTS (
        SELECT FROM lock_clients AS c WHERE c.client = t.client AND c.seen_until > clock_timestamp() - idle
    )
      AND t.since <= clock_timestamp() - idle;
    -- Notes of waits that have ended, see deadlocks/10_look_for_deadlock.sql.
    DELETE FROM waiting_holds AS w
    USING (
        SELECT o.attempt, o.token FROM waiting_holds AS o
        WHERE NOT EXISTS (SELECT FROM lock_tickets AS t WHERE t.attempt = o.attempt AND t.name = o.name)
        FOR UPDATE SKIP LOCKED
    ) AS old
    WHERE w.attempt = old.attempt AND w.token = old.token;
    DELETE FROM lock_presence AS p
    USING (
        SELECT o.presence FROM lock_presence AS o
        WHERE o.incarnation <> pg_postmaster_start_time()
           OR o.gone_since <= clock_timestamp() - greatest(idle, '1 minute')
        FOR UPDATE SKIP LOCKED
    ) AS old
    WHERE p.presence = old.presence;
    PERFORM reap_barriers(idle, batch);
    LOOP
        FOR seen IN
            DELETE FROM distributed_locks AS d
            WHERE d.name = ANY (ARRAY(
                SELECT l.name FROM distributed_locks AS l
                WHERE l.expires_at <= clock_timestamp() - idle
                  AND NOT l.waiting
                  AND (l.kind IS NULL OR l.head IS NOT NULL)
                  AND coalesce(l.released_at, '-infinity') <= clock_timestamp() - idle
                LIMIT batch - deleted
                FOR UPDATE SKIP LOCKED
            ))
            RETURNING d.name, d.token, d.holder, d.expires_at
        LOOP
            deleted := deleted + 1;
            DELETE FROM lock_queues AS q
            USING (SELECT o.name FROM lock_queues AS o WHERE o.name = seen.name FOR UPDATE SKIP LOCKED) AS idle_queue
            WHERE q.name = idle_queue.name;
            -- The lease expired, and no later grant has recorded that.
            IF seen.expires_at > '-infinity' THEN
                PERFORM record_event(seen.name, seen.token, 'expired', seen.holder, seen.expires_at);
            END IF;
        END LOOP;
        EXIT WHEN deleted >= batch OR pruned;
        -- Scan whole tables only when no row is left to delete, and not again with each of a
        -- thousand batches. Wait for no row, because other sessions wait for the rows deleted above
        -- until this transaction ends. A grant in a long transaction or another reaper may have
        -- locked the same rows.
        FOR queued IN
            SELECT l.name FROM distributed_locks AS l
            WHERE l.kind IN ('read-write', 'semaphore') AND NOT l.waiting
              AND coalesce(l.released_at, '-infinity') <= clock_timestamp() - idle
              AND NOT EXISTS (SELECT FROM distributed_locks AS s WHERE s.head = l.name)
            LIMIT batch - deleted
            FOR UPDATE SKIP LOCKED
        LOOP
            -- Now that the head is locked, no share is granted. One may have been granted before.
            DELETE FROM distributed_locks AS d
            WHERE d.name = queued AND NOT EXISTS (SELECT FROM distributed_locks AS s WHERE s.head = queued);
            IF FOUND THEN
                deleted := deleted + 1;
                DELETE FROM lock_queues AS q
                USING (SELECT o.name FROM lock_queues AS o WHERE o.name = queued FOR UPDATE SKIP LOCKED) AS idle_queue
                WHERE q.name = idle_queue.name;
            END IF;
        END LOOP;
        DELETE FROM lock_history AS h
        WHERE h.number = ANY (ARRAY(
            SELECT o.number FROM lock_history AS o
            WHERE o.at <= clock_timestamp() - greatest(idle, '30 days')
            FOR UPDATE SKIP LOCKED
        ));
        -- Queues whose locks have no row any more, because they were locked when the row was
        -- deleted.
        DELETE FROM lock_queues AS q
        WHERE q.name = ANY (ARRAY(
            SELECT o.name FROM lock_queues AS o
            WHERE NOT EXISTS (SELECT FROM distributed_locks AS l WHERE l.name = o.name)
              AND NOT EXISTS (SELECT FROM lock_tickets AS t WHERE t.name = o.name)
            FOR UPDATE SKIP LOCKED
        ));
        FOR queued IN
            SELECT l.name FROM distributed_locks AS l
            WHERE l.waiting AND l.expires_at <= clock_timestamp()
              -- This transaction keeps the rows locked, and a live waiter needs them.
              AND NOT EXISTS (
                  SELECT FROM lock_tickets AS t JOIN lock_clients AS c ON c.client = t.client
                  WHERE t.name = l.name AND c.seen_until > clock_timestamp()
              )
            LIMIT batch
        LOOP
            PERFORM queue_is_empty(queued);
            pruned := true;
        END LOOP;
        EXIT WHEN NOT pruned;
    END LOOP;
    -- Late, because a client that queues again is not marked as alive while its record is deleted.
    DELETE FROM lock_clients AS c
    USING (
        SELECT o.client FROM lock_clients AS o
        WHERE o.seen_until <= clock_timestamp() - greatest(idle, '1 minute')
        FOR UPDATE SKIP LOCKED
    ) AS dead_client
    WHERE c.client = dead_client.client;
    -- Mark presences that have ended and that no session has checked, so that a later run deletes
    -- them. Look the advisory locks up instead of trying them: this transaction would keep every
    -- lock that it tried, and the server's lock table is limited. This comes last, because a client
    -- that is still alive must withdraw its presence within its grace, and would wait for this
    -- transaction.
    UPDATE lock_presence AS p SET gone_since = clock_timestamp()
    FROM (
        SELECT o.presence FROM lock_presence AS o
        WHERE o.gone_since IS NULL AND o.session <> pg_backend_pid() AND (o.advisory_key, o.session) NOT IN (
            SELECT (k.classid::bigint << 32) | k.objid::bigint, k.pid
            FROM pg_locks AS k JOIN pg_database AS d ON d.oid = k.database AND d.datname = current_database()
            WHERE k.locktype = 'advisory' AND k.objsubid = 1 AND k.granted
        )
        FOR UPDATE SKIP LOCKED
    ) AS dead
    WHERE p.presence = dead.presence;
    RETURN deleted;
END
$$;
