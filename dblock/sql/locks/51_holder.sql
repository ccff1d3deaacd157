-- Returns the current holder of the lock. No row means that the lock is free. A read-write lock and
-- a semaphore have a row for each holder, in the order of their grants.
CREATE OR REPLACE FUNCTION holder(name text)
RETURNS TABLE (
    token bigint,
    holder text,
    meta jsonb,
    granted_at timestamptz,
    expires_at timestamptz,
    remaining double precision
)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
        -- A grant that is not durable has no fencing token.
        SELECT CASE WHEN l.token > 0 THEN l.token END, l.holder, l.meta, l.granted_at, l.expires_at,
               -- Subtract numbers: Postgres before 17 cannot subtract from an infinite timestamp.
               date_part('epoch', l.expires_at) - date_part('epoch', clock_timestamp())
        FROM distributed_locks AS l
        WHERE (l.name = holder.name OR l.head = holder.name) AND l.expires_at > clock_timestamp()
        ORDER BY l.granted_at;
END
$$;
