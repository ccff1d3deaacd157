-- Returns the highest token that was issued, 0 for none, and the timeline on which it was minted.
-- For the owner only.
CREATE OR REPLACE FUNCTION show_tokens(OUT highest bigint, OUT timeline bigint)
LANGUAGE sql STABLE SET search_path FROM CURRENT
AS $$
    SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END, timeline
    FROM token_sequence CROSS JOIN token_timeline
$$;
