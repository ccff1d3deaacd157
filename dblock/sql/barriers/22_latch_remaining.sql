-- Returns how much of a latch remains, 0 if it is open. A latch that does not exist yet has its
-- whole count.
CREATE OR REPLACE FUNCTION latch_remaining(name text, count integer) RETURNS integer
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := check_barrier('latch', name, count);
    seen record;
BEGIN
    SELECT l.count, l.remaining INTO seen FROM latches AS l WHERE l.name = latch_remaining.name;
    IF NOT FOUND THEN
        RETURN latch_remaining.count;
    END IF;
    ready := check_same_size('latch', latch_remaining.name, seen.count, latch_remaining.count);
    RETURN seen.remaining;
END
$$;
