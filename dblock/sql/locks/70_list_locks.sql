-- Returns locks in the order of their names: those that are held or waited for or, with
-- `include_free`, every lock that has a row. Selects them by `name` or by a LIKE `pattern`. With
-- `after` only names after that one are listed, for the next page. The token of a grant that is not
-- durable is a negative number that fences nothing. Token 0 means that the lock was never granted.
-- A share of a read-write lock or of a semaphore is listed as a lock, and `head` is the lock that
-- it belongs to. That lock is listed too while a share of it is held, with the number of shares
-- that are `held`. If a lock is selected, so are its shares.
--
-- `dblock grant --may see` allows the functions 70 to 74, because they show the locks of other
-- applications.
CREATE OR REPLACE FUNCTION list_locks(
    pattern text DEFAULT '%',
    name text DEFAULT NULL,
    include_free boolean DEFAULT false,
    max_rows integer DEFAULT 1000,
    after text DEFAULT NULL
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
    waiting bigint,
    kind text,
    head text,
    permits integer,
    held bigint
)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT l.name, l.token, CASE WHEN l.expires_at > clock_timestamp() THEN l.holder END,
           CASE WHEN l.expires_at > clock_timestamp() THEN l.meta END, l.granted_at,
           CASE WHEN l.expires_at > '-infinity' THEN l.expires_at END,
           -- The row of a lock with shares has the time of its last grant there.
           CASE WHEN l.kind IS NULL OR l.head IS NOT NULL THEN l.released_at END, l.forced_at,
           -- Subtract numbers: Postgres before 17 cannot subtract from an infinite timestamp.
           greatest(date_part('epoch', l.expires_at) - date_part('epoch', clock_timestamp()), 0),
           (SELECT count(*) FROM lock_tickets AS t
            JOIN lock_clients AS c ON c.client = t.client AND c.seen_until > clock_timestamp()
            WHERE t.name = l.name),
           l.kind, l.head, l.permits,
           CASE WHEN l.kind IN ('read-write', 'semaphore') THEN (
               SELECT count(*) FROM distributed_locks AS s WHERE s.head = l.name AND s.expires_at > clock_timestamp()
           ) END
    FROM distributed_locks AS l
    WHERE (l.name LIKE list_locks.pattern OR l.head LIKE list_locks.pattern)
      AND (list_locks.after IS NULL OR l.name > list_locks.after)
      AND (list_locks.name IS NULL OR l.name = list_locks.name OR l.head = list_locks.name)
      AND (
          list_locks.include_free OR l.expires_at > clock_timestamp()
          OR (l.kind IN ('read-write', 'semaphore') AND EXISTS (
              SELECT FROM distributed_locks AS s WHERE s.head = l.name AND s.expires_at > clock_timestamp()
          ))
          OR (l.waiting AND EXISTS (
              SELECT FROM lock_tickets AS t
              JOIN lock_clients AS c ON c.client = t.client AND c.seen_until > clock_timestamp()
              WHERE t.name = l.name
          ))
      )
    ORDER BY l.name
    LIMIT list_locks.max_rows
$$;
