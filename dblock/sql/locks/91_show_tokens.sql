-- Returns the highest token that was issued, 0 for none, and by how many seconds it is behind the
-- clock of this server. Negative seconds mean that it is ahead. For the owner only.
CREATE OR REPLACE FUNCTION show_tokens(OUT highest bigint, OUT behind double precision)
LANGUAGE sql STABLE SET search_path FROM CURRENT
AS $$
    SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END,
           date_part('epoch', clock_timestamp()) - last_value / 1000000.0::double precision
    FROM token_sequence
$$;
