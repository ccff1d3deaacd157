-- Shared locks: read-write locks and semaphores. One name has one kind.
--
-- The row of the lock itself is its head. The head is never held: its expires_at stays -infinity,
-- its token is the last one that was minted for any share, released_at is the time of its last
-- grant, and its tickets are the queue. Each grant is a share, a row of its own with its own token
-- and deadline: NAME#writer, NAME#reader-0 and so on, and NAME#0 to NAME#k-1 for the permits of a
-- semaphore. Functions that act on one grant (renew, release, assert_held) take the share's name.
-- How many permits are available is computed from the shares, and stored nowhere.
--
-- Every grant locks the head's row FOR UPDATE until its transaction ends. So all decisions about
-- one shared lock are made one after the other, and tokens are in the order of the grants. A
-- session that has locked the head sees every share and every ticket, because no session inserts
-- either without that lock. In a transaction with an older snapshot, the head or the queue has
-- changed then, and the call fails to serialize.
--
-- A transaction that has proved a lease with assert_held() keeps a KEY SHARE lock on the share. So
-- a grant also locks the shares that it replaces or excludes FOR UPDATE: a writer every share, a
-- reader the writer's share, a permit its own share.
--
-- Lock order: the head's row, the row of its queue, the rows of shares. No session that has locked
-- the head waits for a share, except abandon(), which waits for 500 ms. A session that frees a
-- share has locked that share when it asks for the head, and waits for the head for at most 20 ms.

-- Returns what a row of distributed_locks is, in words for a message.
CREATE OR REPLACE FUNCTION describe_kind(kind text, head text DEFAULT NULL) RETURNS text
LANGUAGE sql IMMUTABLE
AS $$
    SELECT CASE kind
        WHEN 'read-write' THEN 'a read-write lock'
        WHEN 'semaphore' THEN 'a semaphore'
        WHEN 'reader' THEN 'a reader''s share of the read-write lock ' || quote_literal(head)
        WHEN 'writer' THEN 'the writer''s share of the read-write lock ' || quote_literal(head)
        WHEN 'permit' THEN 'a permit of the semaphore ' || quote_literal(head)
        ELSE 'a plain lock'
    END
$$;

-- Refuses a request for a name that has another kind. The detail of the error is the name's kind.
CREATE OR REPLACE FUNCTION refuse_kind(name text, asked text) RETURNS boolean
LANGUAGE plpgsql STABLE
AS $$
#variable_conflict use_column
DECLARE
    seen record;
BEGIN
    SELECT l.kind, l.head INTO seen FROM distributed_locks AS l WHERE l.name = refuse_kind.name;
    RAISE EXCEPTION 'Lock % is %. It cannot be used as %.',
        quote_literal(refuse_kind.name), describe_kind(seen.kind, seen.head), refuse_kind.asked
        USING ERRCODE = 'DBL10', DETAIL = coalesce(seen.kind, 'plain'),
              HINT = 'Use another name. Or delete the lock with delete_lock() while it is not in use.';
END
$$;

-- Returns whether a plain lock was never granted and has no live waiter, so that its row can get
-- another kind. The caller has locked the row. The queue stays locked, and its row is written, so
-- that no client joins the queue of the plain lock in the same moment.
CREATE OR REPLACE FUNCTION is_unused(name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
BEGIN
    IF NOT EXISTS (
        SELECT FROM distributed_locks AS l
        WHERE l.name = is_unused.name AND l.kind IS NULL AND l.token = 0 AND l.expires_at = '-infinity'
    ) OR NOT lock_queue(is_unused.name, 20) THEN
        RETURN false;
    END IF;
    -- Deletes the tickets of dead clients.
    PERFORM first_in_queue(is_unused.name, true);
    UPDATE lock_queues AS q SET last_ticket = q.last_ticket + 1 WHERE q.name = is_unused.name;
    RETURN NOT EXISTS (SELECT FROM lock_tickets AS t WHERE t.name = is_unused.name);
END
$$;

-- Locks the row of a lock FOR UPDATE until the end of the transaction, and waits for that at most
-- so many milliseconds. With a kind, creates the row if there is none. Returns false if another
-- transaction keeps the row locked, or if there is none. Fails to serialize if the row has changed
-- since an older snapshot.
CREATE OR REPLACE FUNCTION lock_head(name text, milliseconds integer, kind text DEFAULT NULL, permits integer DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    patience text := current_setting('lock_timeout');
    locked boolean;
    ignored text;
BEGIN
    IF sees_latest_commits() THEN
        PERFORM 1 FROM distributed_locks AS l WHERE l.name = lock_head.name FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            RETURN true;
        END IF;
    END IF;
    BEGIN
        ignored := set_config('lock_timeout', milliseconds || 'ms', true);
        LOOP
            PERFORM 1 FROM distributed_locks AS l WHERE l.name = lock_head.name FOR UPDATE;
            locked := FOUND;
            EXIT WHEN locked OR lock_head.kind IS NULL;
            INSERT INTO distributed_locks (name, token, expires_at, released_at, kind, permits)
            VALUES (lock_head.name, 0, '-infinity', clock_timestamp(), lock_head.kind, lock_head.permits)
            ON CONFLICT DO NOTHING;
        END LOOP;
        ignored := set_config('lock_timeout', patience, true);
        RETURN locked;
    EXCEPTION WHEN lock_not_available THEN
        RETURN false;
    END;
END
$$;

-- Refuses a name that is too long for a shared lock: the names of its shares are longer.
CREATE OR REPLACE FUNCTION check_shared_name(name text) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    IF name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 480 THEN
        RAISE EXCEPTION 'The name of a read-write lock or a semaphore takes 1 to 480 bytes; this one has %.',
            coalesce(octet_length(name), 0)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN true;
END
$$;
