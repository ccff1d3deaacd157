-- Returns the live candidates of an election in queue order. The next leader is the first of those
-- with the highest rank: its priority, and then the parts of its version.
CREATE OR REPLACE FUNCTION list_candidates(name text)
RETURNS TABLE ("position" bigint, holder text, rank bigint[], since timestamptz)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_asynchronously();
BEGIN
    RETURN QUERY
        SELECT row_number() OVER (ORDER BY c.number), c.holder, c.rank, c.since
        FROM live_candidates(list_candidates.name) AS c;
END
$$;
