-- Who waits, and who is there: what the functions that grant, free and wait share. None of it is granted to an
-- application's role.
--
-- A lock's line is held by an advisory lock. Who has to hold both takes the row first, or waits for the row only where it is
-- known that nobody who holds it wants the line: where nobody waits. So no two can wait for each other.

-- Holds the line of a lock until the end of the transaction; if another has it, waits, or returns false. Those who are in
-- a hurry do it themselves, without the cost of a call.
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

-- Tells whether this transaction sees what others have committed since it began. What it saw then is no ground to declare
-- somebody dead, or a line empty.
CREATE OR REPLACE FUNCTION sees_latest_commits() RETURNS boolean
LANGUAGE sql STABLE
AS $$
    SELECT current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
$$;

-- Tells whether a presence is gone, and its client's process with it: NULL if it is there, or nothing is known; else how many
-- seconds of its grace are left, none or fewer meaning that its locks may go to others.
--
-- A presence is a session that holds a mark, an advisory lock, which ends with the session. A mark counts only in the
-- incarnation of the server that it was made in: a restart changes the postmaster's start, and a crash, a promotion or a
-- restore empties the unlogged table of marks. The grace is counted from when somebody first found the mark gone, so that a
-- client whose session was closed under it has at least that long to say so or to stop believing in its leases.
--
-- Whoever is to `for_takeover` what it holds also holds its row until the end of the transaction. A client that says that it is
-- there all the same (withdraw_presence) waits for that, and then sees what was taken; or has the row first, and nobody takes anything.
CREATE OR REPLACE FUNCTION remaining_grace(presence uuid, for_takeover boolean) RETURNS double precision
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    seen record;
BEGIN
    SELECT p.advisory_key, p.grace INTO seen
    FROM lock_presence AS p
    WHERE p.presence = remaining_grace.presence AND p.incarnation = pg_postmaster_start_time()
      -- The session itself would get its own mark a second time.
      AND p.session <> pg_backend_pid();
    IF NOT FOUND OR NOT sees_latest_commits() OR NOT pg_try_advisory_xact_lock_shared(seen.advisory_key) THEN
        RETURN NULL;
    END IF;
    SELECT p.advisory_key, p.grace, p.gone_since INTO seen
    FROM lock_presence AS p WHERE p.presence = remaining_grace.presence
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN CASE WHEN NOT for_takeover THEN 1 END;
    END IF;
    IF seen.gone_since IS NULL THEN
        UPDATE lock_presence AS p SET gone_since = clock_timestamp() WHERE p.presence = remaining_grace.presence;
        RETURN extract(epoch FROM seen.grace);
    END IF;
    IF for_takeover AND seen.gone_since + seen.grace <= clock_timestamp() THEN
        -- Written and not only held, so that an excuse in a transaction that sees only the past fails, and is sent again.
        UPDATE lock_presence AS p SET gone_since = p.gone_since WHERE p.presence = remaining_grace.presence;
    END IF;
    RETURN extract(epoch FROM seen.gone_since + seen.grace - clock_timestamp());
END
$$;

-- Frees a lock whose holder is gone, if this exact grant still has it and is still tied to that presence. Waits for nobody:
-- false while another is at work on the row.
CREATE OR REPLACE FUNCTION free_dead_holder(name text, token bigint, presence uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
BEGIN
    PERFORM 1 FROM distributed_locks AS l
    WHERE l.name = free_dead_holder.name AND l.token = free_dead_holder.token
      AND l.presence = free_dead_holder.presence
    FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM record_grant_end(free_dead_holder.name, 'died', clock_timestamp());
    UPDATE distributed_locks AS l
    SET expires_at = '-infinity', released_at = clock_timestamp(), attempt = NULL, holder = NULL, meta = NULL
    WHERE l.name = free_dead_holder.name;
    RETURN true;
END
$$;

-- Finds the first in line that is alive. With `prune`, the tickets before it whose clients are dead go; the line must be
-- held then. One whose presence is gone, but not yet for its grace, is passed over and keeps its place.
CREATE OR REPLACE FUNCTION first_in_queue(
    name text, prune boolean, OUT number bigint, OUT attempt uuid, OUT client uuid
)
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    seen record;
    -- What is known of the clients and presences met so far.
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

-- Tells whether the line of a lock is empty, and notes that it is. Waits for nobody: false while another is at work on
-- the lock.
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
    -- In a statement of its own, or it would still see those that have just gone.
    IF EXISTS (SELECT FROM lock_tickets AS t WHERE t.name = queue_is_empty.name) THEN
        RETURN false;
    END IF;
    UPDATE distributed_locks AS l SET waiting = false WHERE l.name = queue_is_empty.name;
    RETURN true;
END
$$;

-- Wakes the first in line of a lock that was freed just now, its row held. Holds the line, so that nobody lines up
-- unseen.
--
-- Only in a transaction that commits asynchronously: a NOTIFY holds a lock of the whole cluster until its commit is
-- through, and would make everyone who notifies wait for our disk. In another the first in line finds out by itself.
CREATE OR REPLACE FUNCTION wake_next(name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    next record;
    done boolean;
BEGIN
    IF current_setting('synchronous_commit') <> 'off' THEN
        RETURN false;
    END IF;
    -- lock_queue(), without the cost of a call; assigned, as below, because that is evaluated without a query.
    done := pg_advisory_xact_lock(hashtextextended(current_schema() || wake_next.name, 1)) IS NOT NULL;
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
        -- A channel of its own for each client, which reveals nothing but a random number.
        done := pg_notify('dblock_' || replace(next.client::text, '-', ''), next.attempt::text) IS NOT NULL;
    ELSIF sees_latest_commits() AND NOT EXISTS (SELECT FROM lock_tickets AS t WHERE t.name = wake_next.name) THEN
        UPDATE distributed_locks AS l SET waiting = false WHERE l.name = wake_next.name;
    END IF;
    RETURN true;
END
$$;

-- Wakes the first in line of a lock, if it is free. Waits for nobody: whoever is at work on the row sees to it, or the
-- first in line finds out by itself.
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

-- Notes that a client who waits is alive, for a while. A client that has not said so for that long is passed over.
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
