-- Wakes a caller of acquire_all() that is in the way of a waiter for this lock, so that it checks
-- at once whether both wait in a cycle. Otherwise that caller checks by itself within half a
-- second. Call it in its own transaction after acquire(), if you wait for a lock while you hold
-- another.
--
-- Follows the holders, from the lock to the lock that its holder waits for, to the first holder
-- that waits with the attempt by which it holds a lock: only a caller of acquire_all() does.
CREATE OR REPLACE FUNCTION wake_set(name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
    at text := wake_set.name;
    passed text[] := '{}';
    other uuid;
    next record;
BEGIN
    ready := commit_asynchronously();
    LOOP
        SELECT l.attempt INTO other FROM distributed_locks AS l
        WHERE l.name = at AND l.expires_at > clock_timestamp();
        EXIT WHEN other IS NULL OR at = ANY (passed);
        SELECT * INTO next FROM wait_of(other);
        EXIT WHEN next.name IS NULL;
        IF next.attempt = other THEN
            RETURN current_setting('synchronous_commit') = 'off' AND notify_waiter(next.client, next.attempt);
        END IF;
        passed := passed || at;
        at := next.name;
    END LOOP;
    RETURN false;
END
$$;
