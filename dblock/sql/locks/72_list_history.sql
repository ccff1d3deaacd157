-- Returns the events of one lock, with those of its shares, or of all, newest first.
CREATE OR REPLACE FUNCTION list_history(name text DEFAULT NULL, max_rows integer DEFAULT 100)
RETURNS TABLE (
    at timestamptz, name text, token bigint, event text, holder text, actor text, reason text, number bigint
)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    -- A grant that is not durable has no fencing token.
    SELECT h.at, h.name, CASE WHEN h.token > 0 THEN h.token END, h.event, h.holder, h.actor, h.reason, h.number
    FROM lock_history AS h
    WHERE list_history.name IS NULL OR h.name = list_history.name
       OR h.name IN (SELECT s.name FROM distributed_locks AS s WHERE s.head = list_history.name)
    ORDER BY h.number DESC
    LIMIT list_history.max_rows
$$;
