-- The queues of the locks: what the functions that grant, free and wait share.
--
-- An advisory lock guards each queue. Lock order: the lock's row, then the queue lock. `acquire`
-- may wait for the row while it holds the queue lock, but only when the queue is empty, because
-- then no session that holds the row will ask for the queue lock. This prevents deadlocks.

-- Takes the queue lock until the end of the transaction. If another session has it, waits, or
-- returns false without `wait`. Hot paths inline this function.
CREATE OR REPLACE FUNCTION lock_queue(name text, wait boolean) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    key CONSTANT bigint := hashtextextended(current_schema() || name, 1);
BEGIN
    IF wait THEN
        RETURN pg_advisory_xact_lock(key) IS NOT NULL;
    END IF;
    RETURN pg_try_advisory_xact_lock(key);
END
$$;

-- Returns the first live ticket in the queue. With `prune`, deletes the tickets before it whose
-- clients are dead. The caller must hold the queue lock for that. A ticket whose presence is gone
-- but still has grace left is skipped, and stays in the queue.
CREATE OR REPLACE FUNCTION first_in_queue(
    name text, prune boolean, OUT number bigint, OUT attempt uuid, OUT client uuid
)
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    seen record;
    -- The clients and presences that this call has checked.
    dead uuid[] := '{}';
    away uuid[] := '{}';
    grace double precision;
BEGIN
    FOR seen IN
        SELECT t.number, t.attempt, t.client, t.presence, c.seen_until
        FROM lock_tickets AS t LEFT JOIN lock_clients AS c ON c.client = t.client
        WHERE t.name = first_in_queue.name
        ORDER BY t.number
    LOOP
        CONTINUE WHEN seen.presence = ANY (away);
        IF (seen.client = ANY (dead) OR seen.presence = ANY (dead)) IS NOT TRUE THEN
            IF (seen.seen_until > clock_timestamp()) IS NOT TRUE THEN
                dead := dead || seen.client;
            ELSE
                grace := CASE WHEN seen.presence IS NOT NULL THEN remaining_grace(seen.presence, false) END;
                IF grace IS NULL THEN
                    number := seen.number;
                    attempt := seen.attempt;
                    client := seen.client;
                    RETURN;
                ELSIF grace > 0 THEN
                    away := away || seen.presence;
                    CONTINUE;
                END IF;
                dead := dead || seen.presence;
            END IF;
        END IF;
        IF prune THEN
            DELETE FROM lock_tickets AS t WHERE t.name = first_in_queue.name AND t.number = seen.number;
        END IF;
    END LOOP;
END
$$;

-- Returns whether the queue of a lock has no live ticket, and then marks the lock as not waited
-- for. Waits for no row: returns false while another transaction has locked it.
CREATE OR REPLACE FUNCTION queue_is_empty(name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
BEGIN
    PERFORM 1 FROM distributed_locks AS l WHERE l.name = queue_is_empty.name FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND OR NOT sees_latest_commits() OR NOT lock_queue(queue_is_empty.name, false)
        OR (SELECT f.number FROM first_in_queue(queue_is_empty.name, true) AS f) IS NOT NULL
    THEN
        RETURN false;
    END IF;
    -- A new statement, because the one above still sees the tickets that it pruned.
    IF EXISTS (SELECT FROM lock_tickets AS t WHERE t.name = queue_is_empty.name) THEN
        RETURN false;
    END IF;
    UPDATE distributed_locks AS l SET waiting = false WHERE l.name = queue_is_empty.name;
    RETURN true;
END
$$;

-- Notifies the first waiter of a lock that was freed just now. The caller has locked the row. Takes
-- the queue lock, so that no client joins the queue unseen.
--
-- Notifies only in a transaction that commits asynchronously. A NOTIFY holds a lock of the whole
-- cluster until its commit is finished, so a durable commit would make every other notifier wait
-- for the disk. Without a notification the first waiter finds out by itself. Returns false then.
CREATE OR REPLACE FUNCTION wake_next(name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    next record;
    ignored boolean;
BEGIN
    IF current_setting('synchronous_commit') <> 'off' THEN
        RETURN false;
    END IF;
    -- Hot path: lock_queue() inlined, and called in an assignment, which PL/pgSQL evaluates without
    -- a query. The same holds for pg_notify() below.
    ignored := pg_advisory_xact_lock(hashtextextended(current_schema() || wake_next.name, 1)) IS NOT NULL;
    SELECT t.number, t.attempt, t.client, c.seen_until, p.advisory_key INTO next
    FROM lock_tickets AS t
    LEFT JOIN lock_clients AS c ON c.client = t.client
    LEFT JOIN lock_presence AS p
        ON p.presence = t.presence AND p.incarnation = pg_postmaster_start_time() AND p.session <> pg_backend_pid()
    WHERE t.name = wake_next.name
    ORDER BY t.number
    LIMIT 1;
    IF FOUND AND NOT (
        next.seen_until > clock_timestamp()
        AND (next.advisory_key IS NULL OR NOT pg_try_advisory_xact_lock_shared(next.advisory_key))
    ) IS TRUE THEN
        next := first_in_queue(wake_next.name, true);
    END IF;
    IF next.number IS NOT NULL THEN
        -- Each client has its own channel, which reveals only a random number.
        ignored := pg_notify('dblock_' || replace(next.client::text, '-', ''), next.attempt::text) IS NOT NULL;
    ELSIF sees_latest_commits() AND NOT EXISTS (SELECT FROM lock_tickets AS t WHERE t.name = wake_next.name) THEN
        UPDATE distributed_locks AS l SET waiting = false WHERE l.name = wake_next.name;
    END IF;
    RETURN true;
END
$$;

-- Notifies the first waiter of a lock, if the lock is free. Waits for no row: a transaction that
-- has locked it wakes the waiter itself, or the waiter finds out by itself.
CREATE OR REPLACE FUNCTION wake_if_free(name text) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
BEGIN
    PERFORM 1 FROM distributed_locks AS l WHERE l.name = wake_if_free.name AND l.waiting FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND AND EXISTS (
        SELECT FROM distributed_locks AS l WHERE l.name = wake_if_free.name AND l.expires_at <= clock_timestamp()
    ) THEN
        PERFORM wake_next(wake_if_free.name);
    END IF;
END
$$;

-- Marks a waiting client as alive for three seconds. A client that is not marked again within that
-- time is skipped, and its tickets are pruned.
CREATE OR REPLACE FUNCTION touch_client(client uuid) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
BEGIN
    IF NOT EXISTS (
        SELECT FROM lock_clients AS c
        WHERE c.client = touch_client.client AND c.seen_until > clock_timestamp() + interval '2 seconds'
    ) THEN
        INSERT INTO lock_clients AS c (client, seen_until)
        VALUES (touch_client.client, clock_timestamp() + interval '3 seconds')
        ON CONFLICT (client) DO UPDATE SET seen_until = greatest(c.seen_until, excluded.seen_until);
    END IF;
END
$$;
