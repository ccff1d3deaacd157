-- Returns the live waiters of a lock in order, as JSON.
CREATE OR REPLACE FUNCTION queue(name text) RETURNS json
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT coalesce(
        json_agg(json_build_object('holder', t.holder, 'since', extract(epoch FROM t.since)) ORDER BY t.number), '[]'
    )
    FROM lock_tickets AS t
    JOIN lock_clients AS c ON c.client = t.client AND c.seen_until > clock_timestamp()
    WHERE t.name = queue.name
$$;
