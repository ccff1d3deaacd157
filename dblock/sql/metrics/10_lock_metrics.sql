-- Returns the numbers that a monitoring system collects, by group of locks: how many are `held`
-- (each share of a shared lock counts), for how many seconds the oldest grant has been held, how
-- many live waiters there are, how many seconds the oldest of them has waited, and how many
-- schedules are overdue.
--
-- The group of a lock is its name up to the first colon, cut to 64 characters. At most `max_groups`
-- groups are returned one by one: first those in `known`, even if all their numbers are 0, then
-- those with the most waiters and holders. All others are added up in the group `other`. If you
-- pass as `known` what you have seen before, the groups that you see do not change from call to
-- call.
CREATE OR REPLACE FUNCTION lock_metrics(known text[] DEFAULT '{}', max_groups integer DEFAULT 100)
RETURNS TABLE (
    "group" text,
    held bigint,
    oldest_hold double precision,
    waiting bigint,
    oldest_wait double precision,
    overdue bigint
)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    WITH facts AS (
        SELECT coalesce(l.head, l.name) AS name, 1 AS held, 0 AS waiting,
               greatest(date_part('epoch', clock_timestamp()) - date_part('epoch', l.granted_at), 0) AS held_for,
               0::double precision AS waited, 0 AS overdue
        FROM distributed_locks AS l WHERE l.expires_at > clock_timestamp()
        UNION ALL
        SELECT t.name, 0, 1, 0, greatest(date_part('epoch', clock_timestamp()) - date_part('epoch', t.since), 0), 0
        FROM lock_tickets AS t
        JOIN lock_clients AS c ON c.client = t.client AND c.seen_until > clock_timestamp()
        UNION ALL
        SELECT s.name, 0, 0, 0, 0, 1 FROM list_schedules(NULL, 0) AS s WHERE s.overdue_since IS NOT NULL
    ),
    summed AS (
        SELECT coalesce(nullif(left(split_part(f.name, ':', 1), 64), ''), 'other') AS prefix,
               sum(f.held) AS held, sum(f.waiting) AS waiting, max(f.held_for) AS held_for, max(f.waited) AS waited,
               sum(f.overdue) AS overdue
        FROM facts AS f GROUP BY 1
        UNION ALL
        SELECT k.prefix, 0, 0, 0, 0, 0 FROM unnest(lock_metrics.known) AS k (prefix) WHERE k.prefix IS NOT NULL
    ),
    ranked AS (
        SELECT s.prefix, sum(s.held) AS held, sum(s.waiting) AS waiting, max(s.held_for) AS held_for,
               max(s.waited) AS waited, sum(s.overdue) AS overdue,
               row_number() OVER (ORDER BY s.prefix <> ALL (lock_metrics.known), s.prefix = 'other',
                                  sum(s.waiting) DESC, sum(s.held) DESC, s.prefix) AS rank
        FROM summed AS s GROUP BY s.prefix
    )
    SELECT CASE WHEN r.rank <= lock_metrics.max_groups THEN r.prefix ELSE 'other' END,
           sum(r.held)::bigint, max(r.held_for), sum(r.waiting)::bigint, max(r.waited), sum(r.overdue)::bigint
    FROM ranked AS r GROUP BY 1 ORDER BY 1
$$;
