-- Frees a lock, whichever grant holds it, and returns whether the lock has a queue. The caller has
-- locked the row and checked the grant. release() and release_all() inline this UPDATE: the first
-- is a hot path, the second frees many rows in one statement.
CREATE OR REPLACE FUNCTION free_lock(name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    queued boolean;
BEGIN
    UPDATE distributed_locks AS l
    SET expires_at = '-infinity', released_at = clock_timestamp(), attempt = NULL, holder = NULL, meta = NULL
    WHERE l.name = free_lock.name
    RETURNING l.waiting INTO queued;
    RETURN queued;
END
$$;

-- Frees a lock whose holder's presence is gone, if this exact grant still holds it and is still
-- tied to that presence. Waits for no row: returns false while another transaction has locked it,
-- or if it has changed since an older snapshot.
CREATE OR REPLACE FUNCTION free_dead_holder(name text, token bigint, presence uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
BEGIN
    BEGIN
        PERFORM 1 FROM distributed_locks AS l
        WHERE l.name = free_dead_holder.name AND l.token = free_dead_holder.token
          AND l.presence = free_dead_holder.presence
        FOR NO KEY UPDATE SKIP LOCKED;
    EXCEPTION WHEN serialization_failure THEN
        RETURN false;
    END;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM record_grant_end(free_dead_holder.name, 'died', clock_timestamp());
    PERFORM free_lock(free_dead_holder.name);
    RETURN true;
END
$$;

-- Locks a lock's row until the end of the transaction, for at most 20 ms of waiting. Returns false
-- if another transaction keeps it locked, if it has changed since an older snapshot, or if there is
-- none.
CREATE OR REPLACE FUNCTION lock_row_briefly(name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    patience text := current_setting('lock_timeout');
    ignored text;
BEGIN
    IF sees_latest_commits() THEN
        PERFORM 1 FROM distributed_locks AS l WHERE l.name = lock_row_briefly.name FOR NO KEY UPDATE SKIP LOCKED;
        IF FOUND THEN
            RETURN true;
        END IF;
    END IF;
    BEGIN
        ignored := set_config('lock_timeout', '20ms', true);
        PERFORM 1 FROM distributed_locks AS l WHERE l.name = lock_row_briefly.name FOR NO KEY UPDATE;
        ignored := set_config('lock_timeout', patience, true);
        RETURN FOUND;
    EXCEPTION WHEN lock_not_available OR serialization_failure THEN
        RETURN false;
    END;
END
$$;
