-- Returns the live waiters of one lock or of all, in queue order. `seconds` is how long each has
-- waited. `mode` is what it waits for at a read-write lock: `read` or `write`.
CREATE OR REPLACE FUNCTION list_waiters(name text DEFAULT NULL, max_rows integer DEFAULT 1000)
RETURNS TABLE (name text, "position" bigint, holder text, since timestamptz, seconds double precision, mode text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT t.name, row_number() OVER (PARTITION BY t.name ORDER BY t.number), t.holder, t.since,
           date_part('epoch', clock_timestamp()) - date_part('epoch', t.since), t.mode
    FROM lock_tickets AS t
    JOIN lock_clients AS c ON c.client = t.client AND c.seen_until > clock_timestamp()
    WHERE list_waiters.name IS NULL OR t.name = list_waiters.name
    ORDER BY t.name, t.number
    LIMIT list_waiters.max_rows
$$;
