-- Takes a party whose wait is over out of a barrier, so that it does not count. If the barrier has
-- tripped with this party before, returns the party's number, else NULL: then it never counts.
CREATE OR REPLACE FUNCTION leave_barrier(name text, attempt uuid) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_asynchronously();
    number integer;
BEGIN
    PERFORM 1 FROM barriers AS b WHERE b.name = leave_barrier.name FOR NO KEY UPDATE;
    SELECT p.number INTO number
    FROM barrier_passes AS p WHERE p.attempt = leave_barrier.attempt AND p.name = leave_barrier.name;
    DELETE FROM barrier_waiters AS w
    WHERE w.attempt = leave_barrier.attempt AND w.kind = 'barrier' AND w.name = leave_barrier.name;
    RETURN number;
END
$$;
