-- Returns the barriers and latches, in the order of their names. `size` is the number of parties,
-- or the count of a latch. `remaining` is how many parties or counts are missing now. `generation`
-- is how often a barrier has tripped. `waiters` are the live ones, in the order of arrival.
CREATE OR REPLACE FUNCTION list_barriers(name text DEFAULT NULL)
RETURNS TABLE (
    kind text,
    name text,
    size integer,
    remaining integer,
    generation bigint,
    waiters jsonb,
    used_at timestamptz
)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT b.kind, b.name, b.size,
           coalesce(b.remaining, greatest(b.size - jsonb_array_length(live.waiters), 0)), b.generation, live.waiters,
           b.used_at
    FROM (
        SELECT 'barrier' AS kind, o.name, o.parties AS size, NULL::integer AS remaining, o.generation, o.used_at
        FROM barriers AS o
        UNION ALL
        SELECT 'latch', l.name, l.count, l.remaining, NULL, l.used_at FROM latches AS l
    ) AS b
    CROSS JOIN LATERAL (
        SELECT coalesce(
            jsonb_agg(
                jsonb_build_object('holder', w.holder, 'since', extract(epoch FROM w.since)) ORDER BY w.number, w.since
            ),
            '[]'
        ) AS waiters
        FROM barrier_waiters AS w JOIN lock_clients AS c ON c.client = w.client AND c.seen_until > clock_timestamp()
        WHERE w.kind = b.kind AND w.name = b.name AND NOT w.over
    ) AS live
    WHERE list_barriers.name IS NULL OR b.name = list_barriers.name
    ORDER BY b.name, b.kind
$$;
