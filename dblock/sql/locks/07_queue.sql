-- The queues of the locks: what the functions that grant, free and wait share.
--
-- A row of lock_queues guards each queue. Only the owner of the tables can lock it, through these
-- functions. A client that joins the queue locks the row and writes the number of its ticket there,
-- until its transaction ends. So a session that has locked the row sees every ticket, or, in a
-- transaction with an older snapshot, gets a serialization failure.
--
-- Lock order: the lock's row, then the row of its queue. `acquire` may wait for the lock's row
-- while it has the queue locked, but only while the lock is not marked as waited for. A session
-- that frees the lock does not ask for the queue then. Besides, no wait for either row is longer
-- than 20 ms.
--
-- Waking a waiter is a courtesy: a waiter that is not notified finds out by itself. So a function
-- that frees a lock neither fails nor waits for long because of a queue.

-- Locks the queue until the end of the transaction, and waits for that at most so many
-- milliseconds. Returns false if another transaction keeps the queue locked, or if the queue has
-- changed since an older snapshot.
CREATE OR REPLACE FUNCTION lock_queue(name text, milliseconds integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    patience text := current_setting('lock_timeout');
    ignored text;
BEGIN
    IF sees_latest_commits() THEN
        PERFORM 1 FROM lock_queues AS q WHERE q.name = lock_queue.name FOR NO KEY UPDATE SKIP LOCKED;
        IF FOUND THEN
            RETURN true;
        END IF;
    END IF;
    BEGIN
        ignored := set_config('lock_timeout', milliseconds || 'ms', true);
        PERFORM lock_or_create_queue(lock_queue.name);
        ignored := set_config('lock_timeout', patience, true);
        RETURN true;
    EXCEPTION WHEN lock_not_available OR serialization_failure THEN
        RETURN false;
    END;
END
$$;

-- Locks the queue, and creates its row if there is none: after a crash, or because no client has
-- waited for the lock before. Waits as long as lock_timeout allows.
CREATE OR REPLACE FUNCTION lock_or_create_queue(name text) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
BEGIN
    LOOP
        PERFORM 1 FROM lock_queues AS q WHERE q.name = lock_or_create_queue.name FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO lock_queues (name, last_ticket)
        SELECT lock_or_create_queue.name,
               greatest(
                   (SELECT l.last_served_ticket FROM distributed_locks AS l WHERE l.name = lock_or_create_queue.name),
                   (SELECT max(t.number) FROM lock_tickets AS t WHERE t.name = lock_or_create_queue.name),
                   0
               )
        ON CONFLICT DO NOTHING;
    END LOOP;
END
$$;

-- Returns the first live ticket in the queue. With `prune`, deletes the tickets before it whose
-- clients are dead. The caller must have locked the queue for that. A ticket whose presence is gone
-- but still has grace left is skipped, and stays in the queue. So does a dead client's ticket that
-- another transaction is redeeming or giving up.
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
            IF (seen.seen_until > clock_timestamp()) IS NOT TRUE AND snapshot_is_fresh() THEN
                dead := dead || seen.client;
            ELSE
                grace := CASE WHEN seen.presence IS NOT NULL THEN remaining_grace(seen.presence, false, false) END;
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
            DELETE FROM lock_tickets AS t
            USING (
                SELECT o.name, o.number FROM lock_tickets AS o
                WHERE o.name = first_in_queue.name AND o.number = seen.number
                FOR UPDATE SKIP LOCKED
            ) AS dead_ticket
            WHERE t.name = dead_ticket.name AND t.number = dead_ticket.number;
        END IF;
    END LOOP;
END
$$;

-- Returns whether the client of the first ticket is alive, without a lock of any row. False means
-- that there is no ticket, or that the first one is worth a look by first_in_queue().
CREATE OR REPLACE FUNCTION first_is_alive(name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    heard boolean;
    presence uuid;
BEGIN
    SELECT c.seen_until > clock_timestamp(), t.presence INTO heard, presence
    FROM lock_tickets AS t LEFT JOIN lock_clients AS c ON c.client = t.client
    WHERE t.name = first_is_alive.name
    ORDER BY t.number
    LIMIT 1;
    RETURN heard IS TRUE AND (
        presence IS NULL OR NOT pg_try_advisory_xact_lock_shared(presence_key(presence))
        OR NOT presence_is_registered(presence)
    );
END
$$;

-- Returns whether the queue of a lock has no live ticket, and then marks the lock as not waited
-- for. Waits for no row: returns false while another transaction has locked the lock or its queue,
-- or if one of them has changed since an older snapshot.
CREATE OR REPLACE FUNCTION queue_is_empty(name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
BEGIN
    BEGIN
        PERFORM 1 FROM distributed_locks AS l WHERE l.name = queue_is_empty.name FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND OR NOT lock_queue(queue_is_empty.name, 1)
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
    EXCEPTION WHEN serialization_failure THEN
        RETURN false;
    END;
END
$$;

-- Returns whether the heartbeat of a client counts at this moment. The client of a ticket that is
-- less than two seconds old needs no such look: the call that issued the ticket found a heartbeat
-- that counts for longer, or wrote one. See keep_ticket() for the exception.
CREATE OR REPLACE FUNCTION client_is_alive(client uuid) RETURNS boolean
LANGUAGE plpgsql STABLE
AS $$
#variable_conflict use_column
BEGIN
    RETURN EXISTS (
        SELECT FROM lock_clients AS c WHERE c.client = client_is_alive.client AND c.seen_until > clock_timestamp()
    );
END
$$;

-- Notifies the first waiter of a lock that was freed just now. The caller has locked the row.
--
-- The first live ticket can be notified without the queue's lock, because the ticket of a client
-- that is joining has a higher number. Only if no live ticket is first, wake_past_the_dead() needs
-- the queue.
--
-- Notifies only in a transaction that commits asynchronously. A NOTIFY holds a lock of the whole
-- cluster until its commit is finished, so a durable commit would make every other notifier wait
-- for the disk. And notifies only while the cluster's queue of notifications has room: otherwise
-- the commit would fail. Without a notification the first waiter finds out by itself. Returns false
-- then.
CREATE OR REPLACE FUNCTION wake_next(name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    -- The first ticket. Not a record, which costs more.
    next_attempt uuid;
    next_client uuid;
    next_presence uuid;
    next_since timestamptz;
BEGIN
    IF current_setting('synchronous_commit') <> 'off' THEN
        RETURN false;
    END IF;
    SELECT t.attempt, t.client, t.presence, t.since INTO next_attempt, next_client, next_presence, next_since
    FROM lock_tickets AS t
    WHERE t.name = wake_next.name
    ORDER BY t.number
    LIMIT 1;
    IF FOUND AND (next_since > clock_timestamp() - interval '2 seconds' OR client_is_alive(next_client))
        AND (
            next_presence IS NULL OR NOT pg_try_advisory_xact_lock_shared(presence_key(next_presence))
            OR NOT presence_is_registered(next_presence)
        )
    THEN
        -- Hot path: notify_waiter() inlined, and called in an assignment, which PL/pgSQL evaluates
        -- without a query.
        RETURN pg_notification_queue_usage() < 0.9
            AND pg_notify('dblock_' || replace(next_client::text, '-', ''), next_attempt::text) IS NOT NULL;
    END IF;
    IF sees_latest_commits() THEN
        IF NOT FOUND THEN
            -- Hot path: wake_past_the_dead() inlined for a queue that is empty.
            PERFORM 1 FROM lock_queues AS q WHERE q.name = wake_next.name FOR NO KEY UPDATE SKIP LOCKED;
            IF FOUND AND NOT EXISTS (SELECT FROM lock_tickets AS t WHERE t.name = wake_next.name) THEN
                UPDATE distributed_locks AS l SET waiting = false WHERE l.name = wake_next.name;
                RETURN true;
            END IF;
        END IF;
        RETURN wake_past_the_dead(wake_next.name);
    END IF;
    BEGIN
        RETURN wake_past_the_dead(wake_next.name);
    EXCEPTION WHEN serialization_failure THEN
        RETURN false;
    END;
END
$$;

-- Notifies the first live waiter of a lock and deletes the tickets of the dead ones before it, or
-- marks the lock as not waited for if its queue is empty. The caller has locked the row. A client
-- that is joining usually has finished within the 10 ms for which this waits.
CREATE OR REPLACE FUNCTION wake_past_the_dead(name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    next record;
BEGIN
    IF NOT lock_queue(wake_past_the_dead.name, 10) THEN
        RETURN false;
    END IF;
    next := first_in_queue(wake_past_the_dead.name, true);
    IF next.number IS NOT NULL THEN
        RETURN notify_waiter(next.client, next.attempt);
    END IF;
    IF NOT EXISTS (SELECT FROM lock_tickets AS t WHERE t.name = wake_past_the_dead.name) THEN
        UPDATE distributed_locks AS l SET waiting = false WHERE l.name = wake_past_the_dead.name;
    END IF;
    RETURN true;
END
$$;

-- Notifies a waiter, unless the cluster's queue of notifications is nearly full. Each client has
-- its own channel, which reveals only a random number.
CREATE OR REPLACE FUNCTION notify_waiter(client uuid, attempt uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    RETURN pg_notification_queue_usage() < 0.9
        AND pg_notify('dblock_' || replace(notify_waiter.client::text, '-', ''), notify_waiter.attempt::text)
            IS NOT NULL;
END
$$;

-- Notifies the first waiter of a lock, if the lock is free, or the waiters of a shared lock that
-- can be granted now. Waits for no row: a transaction that has locked it wakes the waiter itself,
-- or the waiter finds out by itself.
CREATE OR REPLACE FUNCTION wake_if_free(name text) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    seen record;
BEGIN
    SELECT l.kind, l.head INTO seen FROM distributed_locks AS l
    WHERE l.name = wake_if_free.name AND (l.waiting OR l.head IS NOT NULL)
    FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF seen.kind IS NOT NULL THEN
        PERFORM wake_shared(coalesce(seen.head, wake_if_free.name));
    ELSIF EXISTS (
        SELECT FROM distributed_locks AS l WHERE l.name = wake_if_free.name AND l.expires_at <= clock_timestamp()
    ) THEN
        PERFORM wake_next(wake_if_free.name);
    END IF;
END
$$;

-- Marks a waiting client as alive for three seconds. A client that is not marked again within that
-- time is skipped, and its tickets are pruned.
--
-- The caller may have locked a queue. So if another transaction of the same client stays open, the
-- mark is left to that one.
CREATE OR REPLACE FUNCTION touch_client(client uuid) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    patience text := current_setting('lock_timeout');
    ignored text;
BEGIN
    IF NOT EXISTS (
        SELECT FROM lock_clients AS c
        WHERE c.client = touch_client.client AND c.seen_until > clock_timestamp() + interval '2 seconds'
    ) THEN
        ignored := set_config('lock_timeout', '20ms', true);
        INSERT INTO lock_clients AS c (client, seen_until)
        VALUES (touch_client.client, clock_timestamp() + interval '3 seconds')
        ON CONFLICT (client) DO UPDATE SET seen_until = greatest(c.seen_until, excluded.seen_until);
        ignored := set_config('lock_timeout', patience, true);
    END IF;
EXCEPTION WHEN lock_not_available THEN
    NULL;
END
$$;
