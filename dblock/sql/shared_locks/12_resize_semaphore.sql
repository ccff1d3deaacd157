-- Changes how many permits a semaphore has, and returns the number that it had before. A larger
-- semaphore wakes the waiters that can be granted now. A smaller one takes a permit from no holder:
-- no permit is granted until fewer are held.
--
-- Notifies in a durable commit, unlike the functions that are called often: see wake_next().
CREATE OR REPLACE FUNCTION resize_semaphore(name text, permits integer) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := check_shared_name(resize_semaphore.name);
    seen record;
BEGIN
    IF (resize_semaphore.permits BETWEEN 1 AND 100000) IS NOT TRUE THEN
        RAISE EXCEPTION 'A semaphore has 1 to 100000 permits; got % for %.',
            coalesce(resize_semaphore.permits::text, 'none'), quote_literal(resize_semaphore.name)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    ready := commit_durably();
    -- Waits as long as lock_timeout allows: a grant in progress takes a moment.
    SELECT l.kind, l.permits INTO seen FROM distributed_locks AS l WHERE l.name = resize_semaphore.name FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'There is no semaphore %.', quote_literal(resize_semaphore.name)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'The first call that acquires it creates it.';
    END IF;
    IF seen.kind IS DISTINCT FROM 'semaphore' THEN
        ready := refuse_kind(resize_semaphore.name, 'a semaphore');
    END IF;
    UPDATE distributed_locks AS l SET permits = resize_semaphore.permits WHERE l.name = resize_semaphore.name;
    IF resize_semaphore.permits > seen.permits THEN
        ready := notify_shared(resize_semaphore.name);
    END IF;
    RETURN seen.permits;
END
$$;
