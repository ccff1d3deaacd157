-- What goes on, for those who look after it. Granted only by `dblock grant --may see`: other applications' locks are in it.

-- Tells of locks in the order of their names, of those that are held or waited for, or of `include_free` one that is remembered; by
-- name, or by a pattern as LIKE takes it. At most `max_rows`. The token of a grant without durability is a negative number that
-- fences nothing, and 0 is before the first grant.
CREATE OR REPLACE FUNCTION list_locks(
    pattern text DEFAULT '%',
    name text DEFAULT NULL,
    include_free boolean DEFAULT false,
    max_rows integer DEFAULT 1000
)
RETURNS TABLE (
    name text,
    token bigint,
    holder text,
    meta jsonb,
    granted_at timestamptz,
    expires_at timestamptz,
    released_at timestamptz,
    forced_at timestamptz,
    remaining double precision,
    waiting bigint
)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT l.name, l.token, CASE WHEN l.expires_at > clock_timestamp() THEN l.holder END,
           CASE WHEN l.expires_at > clock_timestamp() THEN l.meta END, l.granted_at,
           CASE WHEN l.expires_at > '-infinity' THEN l.expires_at END, l.released_at, l.forced_at,
           -- Subtracted as numbers: Postgres before 17 refuses to subtract from an infinite time.
           greatest(date_part('epoch', l.expires_at) - date_part('epoch', clock_timestamp()), 0),
           (SELECT count(*) FROM lock_tickets AS t
            JOIN lock_clients AS c ON c.client = t.client AND c.seen_until > clock_timestamp()
            WHERE t.name = l.name)
    FROM distributed_locks AS l
    WHERE l.name LIKE list_locks.pattern AND (list_locks.name IS NULL OR l.name = list_locks.name)
      AND (
          list_locks.include_free OR l.expires_at > clock_timestamp()
          OR (l.waiting AND EXISTS (
              SELECT FROM lock_tickets AS t
              JOIN lock_clients AS c ON c.client = t.client AND c.seen_until > clock_timestamp()
              WHERE t.name = l.name
          ))
      )
    ORDER BY l.name
    LIMIT list_locks.max_rows
$$;

-- Tells who waits, for one lock or for all, in order; only those who are alive. `seconds` is for how long.
CREATE OR REPLACE FUNCTION list_waiters(name text DEFAULT NULL, max_rows integer DEFAULT 1000)
RETURNS TABLE (name text, "position" bigint, holder text, since timestamptz, seconds double precision)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT t.name, row_number() OVER (PARTITION BY t.name ORDER BY t.number), t.holder, t.since,
           date_part('epoch', clock_timestamp()) - date_part('epoch', t.since)
    FROM lock_tickets AS t
    JOIN lock_clients AS c ON c.client = t.client AND c.seen_until > clock_timestamp()
    WHERE list_waiters.name IS NULL OR t.name = list_waiters.name
    ORDER BY t.name, t.number
    LIMIT list_waiters.max_rows
$$;

-- Tells the history, of one lock or of all, the newest first.
CREATE OR REPLACE FUNCTION list_history(name text DEFAULT NULL, max_rows integer DEFAULT 100)
RETURNS TABLE (
    at timestamptz, name text, token bigint, event text, holder text, actor text, reason text, number bigint
)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    -- A grant without durability has no fencing token.
    SELECT h.at, h.name, CASE WHEN h.token > 0 THEN h.token END, h.event, h.holder, h.actor, h.reason, h.number
    FROM lock_history AS h
    WHERE list_history.name IS NULL OR h.name = list_history.name
    ORDER BY h.number DESC
    LIMIT list_history.max_rows
$$;

-- Tells whether grants and releases are noted in the history, and not only what went wrong.
CREATE OR REPLACE FUNCTION grants_are_recorded() RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT EXISTS (
        SELECT FROM pg_trigger AS t WHERE t.tgrelid = 'distributed_locks'::regclass AND t.tgname = 'record_grant_change'
    )
$$;
