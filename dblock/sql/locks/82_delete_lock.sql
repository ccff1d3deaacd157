-- Deletes the rows of a lock that is free and has no live waiter: of a plain lock its row, of a
-- read-write lock or a semaphore also those of its shares. Afterwards the name can have another
-- kind. False means that the lock does not exist or is in use: it is held, a client waits for it,
-- or another transaction has locked or proved it. Tokens stay in order, as after reap().
--
-- For the owner, and for roles that `dblock grant --may force-release` allows.
CREATE OR REPLACE FUNCTION delete_lock(name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_durably();
    seen record;
BEGIN
    IF NOT lock_head(delete_lock.name, 20) THEN
        RETURN false;
    END IF;
    SELECT l.kind, l.head, l.expires_at > clock_timestamp() AS held INTO seen
    FROM distributed_locks AS l WHERE l.name = delete_lock.name;
    IF seen.head IS NOT NULL THEN
        RAISE EXCEPTION 'Lock % is %. It cannot be deleted alone.',
            quote_literal(delete_lock.name), describe_kind(seen.kind, seen.head)
            USING ERRCODE = 'DBL10', DETAIL = seen.kind, HINT = format('Delete %L.', seen.head);
    END IF;
    IF seen.held OR NOT lock_queue(delete_lock.name, 20) THEN
        RETURN false;
    END IF;
    -- Deletes the tickets of dead clients.
    PERFORM first_in_queue(delete_lock.name, true);
    IF EXISTS (SELECT FROM lock_tickets AS t WHERE t.name = delete_lock.name)
        OR (seen.kind IS NOT NULL AND lock_free_shares(delete_lock.name, '{reader,writer,permit}') > 0)
    THEN
        RETURN false;
    END IF;
    PERFORM record_grant_end(l.name, 'expired')
    FROM distributed_locks AS l WHERE l.name = delete_lock.name OR l.head = delete_lock.name;
    DELETE FROM distributed_locks AS l WHERE l.name = delete_lock.name OR l.head = delete_lock.name;
    DELETE FROM lock_queues AS q WHERE q.name = delete_lock.name;
    RETURN true;
END
$$;
