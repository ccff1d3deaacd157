-- Deletes a barrier, or returns false if there is none. Parties that wait at it arrive again within
-- a second, and so create it again. Parties of a generation that has tripped, and that have not
-- asked again since, keep their passes.
CREATE OR REPLACE FUNCTION delete_barrier(name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_durably();
BEGIN
    DELETE FROM barriers AS b WHERE b.name = delete_barrier.name;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM barrier_waiters AS w WHERE w.kind = 'barrier' AND w.name = delete_barrier.name AND NOT w.over;
    DELETE FROM barrier_passes AS p
    WHERE p.name = delete_barrier.name
      AND NOT EXISTS (SELECT FROM barrier_waiters AS w WHERE w.attempt = p.attempt);
    RETURN true;
END
$$;

-- Deletes a latch, or returns false if there is none. Waiters ask again within a second, and so
-- create it again with its whole count.
CREATE OR REPLACE FUNCTION delete_latch(name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_durably();
BEGIN
    DELETE FROM latches AS l WHERE l.name = delete_latch.name;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM latch_counts AS c WHERE c.name = delete_latch.name;
    DELETE FROM barrier_waiters AS w WHERE w.kind = 'latch' AND w.name = delete_latch.name;
    RETURN true;
END
$$;
