-- Frees the lock only if this exact grant still holds it, and wakes the first waiter and no other.
-- A share of a shared lock wakes the waiters that can be granted now.
-- False means that the grant does not hold it: the lease expired, the lock was granted again, or it
-- was released before.
--
-- With `durable => false` the transaction commits asynchronously: a crash that loses the release
-- only keeps the lock until its deadline. This setting applies to the whole transaction, so it
-- stays as it is if the transaction has written before, and it covers what the transaction writes
-- afterwards. Call release in its own transaction, or as the last statement.
CREATE OR REPLACE FUNCTION release(name text, token bigint, durable boolean DEFAULT true)
RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ignored text;
    ready boolean;
    queued boolean;
    head text;
BEGIN
    -- Hot path: commit_asynchronously() and free_lock() inlined.
    IF NOT release.durable AND pg_current_xact_id_if_assigned() IS NULL THEN
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    -- The newest version of the row is looked for from the end of the index, as in try_acquire().
    UPDATE distributed_locks AS l
    SET expires_at = '-infinity', released_at = clock_timestamp(), attempt = NULL, holder = NULL, meta = NULL
    WHERE l.token = release.token AND l.expires_at > clock_timestamp()
      AND l.ctid = (
          SELECT o.ctid FROM distributed_locks AS o
          WHERE o.name >= release.name AND o.name <= release.name
          ORDER BY o.name DESC
          LIMIT 1
      )
    RETURNING l.waiting, l.head INTO queued, head;
    -- Hot path: released, and no waiter to wake. Both are NULL if nothing was released. One test,
    -- because each expression of PL/pgSQL is prepared again in each transaction.
    IF NOT queued AND head IS NULL THEN
        RETURN true;
    ELSIF NOT FOUND THEN
        -- The row may have moved since it was looked for, by a renewal.
        UPDATE distributed_locks AS l
        SET expires_at = '-infinity', released_at = clock_timestamp(), attempt = NULL, holder = NULL, meta = NULL
        WHERE l.name = release.name AND l.token = release.token AND l.expires_at > clock_timestamp()
        RETURNING l.waiting, l.head INTO queued, head;
    END IF;
    IF queued THEN
        ready := wake_next(release.name);
        RETURN true;
    ELSIF head IS NOT NULL THEN
        ready := wake_shared(head);
        RETURN true;
    ELSIF FOUND THEN
        RETURN true;
    END IF;
    ready := check_snapshot();
    RETURN false;
END
$$;
