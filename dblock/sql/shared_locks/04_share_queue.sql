-- The queue of a shared lock: the tickets under the name of its head.

-- Returns the first `enough` live tickets, in order: those before the ticket `before`, if it is
-- given, and only writers, if `wanted` is `write`. With `prune`, deletes the tickets among them
-- whose clients are dead. The caller must have locked the head for that. A ticket is judged as in
-- first_in_queue().
CREATE OR REPLACE FUNCTION live_tickets(name text, enough integer, wanted text, before bigint, prune boolean)
RETURNS TABLE (number bigint, attempt uuid, client uuid, mode text)
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    seen record;
    -- The clients and presences that this call has checked.
    alive uuid[] := '{}';
    dead uuid[] := '{}';
    away uuid[] := '{}';
    grace double precision;
    found_so_far integer := 0;
    tickets refcursor;
BEGIN
    IF enough <= 0 THEN
        RETURN;
    END IF;
    IF live_tickets.wanted = 'write' THEN
        -- Written out, so that the index of waiting writers serves it.
        OPEN tickets FOR
            SELECT t.number, t.attempt, t.client, t.presence, t.mode, c.seen_until
            FROM lock_tickets AS t LEFT JOIN lock_clients AS c ON c.client = t.client
            WHERE t.name = live_tickets.name AND t.mode = 'write'
              AND (t.number < live_tickets.before OR live_tickets.before IS NULL)
            ORDER BY t.number;
    ELSE
        OPEN tickets FOR
            SELECT t.number, t.attempt, t.client, t.presence, t.mode, c.seen_until
            FROM lock_tickets AS t LEFT JOIN lock_clients AS c ON c.client = t.client
            WHERE t.name = live_tickets.name AND (t.number < live_tickets.before OR live_tickets.before IS NULL)
            ORDER BY t.number;
    END IF;
    LOOP
        FETCH tickets INTO seen;
        EXIT WHEN NOT FOUND;
        CONTINUE WHEN seen.presence = ANY (away);
        IF (seen.client = ANY (dead) OR seen.presence = ANY (dead)) IS NOT TRUE THEN
            IF (seen.seen_until > clock_timestamp()) IS NOT TRUE AND snapshot_is_fresh() THEN
                dead := dead || seen.client;
            ELSE
                grace := CASE
                    WHEN seen.presence IS NOT NULL AND seen.presence <> ALL (alive)
                        THEN remaining_grace(seen.presence, false, false)
                END;
                IF grace IS NULL THEN
                    IF seen.presence IS NOT NULL THEN
                        alive := alive || seen.presence;
                    END IF;
                    number := seen.number;
                    attempt := seen.attempt;
                    client := seen.client;
                    mode := seen.mode;
                    RETURN NEXT;
                    found_so_far := found_so_far + 1;
                    EXIT WHEN found_so_far >= enough;
                    CONTINUE;
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
                WHERE o.name = live_tickets.name AND o.number = seen.number
                FOR UPDATE SKIP LOCKED
            ) AS dead_ticket
            WHERE t.name = dead_ticket.name AND t.number = dead_ticket.number;
        END IF;
    END LOOP;
    CLOSE tickets;
END
$$;

-- Returns the kinds of shares that exclude a grant: a reader only the writer's, else all.
CREATE OR REPLACE FUNCTION excluding_kinds(mode text) RETURNS text[]
LANGUAGE sql IMMUTABLE
AS $$
    SELECT CASE mode WHEN 'read' THEN '{writer}'::text[] WHEN 'write' THEN '{reader,writer}' ELSE '{permit}' END
$$;

-- Notifies the waiters of a shared lock that can be granted now: one writer, all readers before the
-- first writer, or as many waiters as permits are free. Returns false if they have to find out by
-- themselves.
--
-- The head is locked, so that a client that is joining the queue either has finished, and is found
-- here, or comes later and sees the share that was freed. Like wake_next(), it notifies only in a
-- transaction that commits asynchronously, and neither fails nor waits for long.
CREATE OR REPLACE FUNCTION wake_shared(head text) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    RETURN current_setting('synchronous_commit') = 'off' AND lock_row_briefly(wake_shared.head)
        AND notify_shared(wake_shared.head);
END
$$;

-- Notifies the waiters of a shared lock that can be granted now. The caller has locked the head.
CREATE OR REPLACE FUNCTION notify_shared(head text) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    seen record;
    shares record;
    next record;
    notified boolean := true;
BEGIN
    SELECT l.kind, l.permits, l.waiting INTO seen FROM distributed_locks AS l WHERE l.name = notify_shared.head;
    IF NOT FOUND OR NOT seen.waiting THEN
        RETURN true;
    END IF;
    IF seen.kind = 'semaphore' THEN
        shares := look_at_shares(notify_shared.head, '{permit}', false, false);
        FOR next IN
            SELECT t.client, t.attempt
            FROM live_tickets(notify_shared.head, seen.permits - shares.held, NULL, NULL, false) AS t
        LOOP
            notified := notify_waiter(next.client, next.attempt) AND notified;
        END LOOP;
        RETURN notified;
    END IF;
    SELECT t.client, t.attempt, t.mode INTO next FROM live_tickets(notify_shared.head, 1, NULL, NULL, false) AS t;
    IF NOT FOUND THEN
        RETURN true;
    END IF;
    shares := look_at_shares(notify_shared.head, excluding_kinds(next.mode), false, false);
    IF shares.held > 0 THEN
        RETURN true;
    END IF;
    IF next.mode = 'write' THEN
        RETURN notify_waiter(next.client, next.attempt);
    END IF;
    FOR next IN
        SELECT t.client, t.attempt FROM lock_tickets AS t
        WHERE t.name = notify_shared.head AND t.mode = 'read'
          AND t.number < coalesce(
              (SELECT w.number FROM live_tickets(notify_shared.head, 1, 'write', NULL, false) AS w),
              9223372036854775807
          )
        ORDER BY t.number
    LOOP
        notified := notify_waiter(next.client, next.attempt) AND notified;
    END LOOP;
    RETURN notified;
END
$$;
