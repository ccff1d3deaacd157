-- Wakes the first waiter of a lock that is free. Call it in its own transaction, which then commits
-- asynchronously.
CREATE OR REPLACE FUNCTION wake_queue(name text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
DECLARE
    ready boolean;
BEGIN
    ready := commit_asynchronously();
    PERFORM wake_if_free(wake_queue.name);
END
$$;
