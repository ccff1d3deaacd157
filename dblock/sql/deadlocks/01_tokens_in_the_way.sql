-- Returns the tokens of the grants that a ticket waits for: none of them can stay if the ticket is
-- to be redeemed. find_cycle() relies on that, because a wait that any one of several holders can
-- end is no deadlock while one of them is not stuck.
--
-- A plain lock has one holder. A ticket for a write waits for every share of its lock. A ticket for
-- a read waits for the writer, and for readers only if a write is ahead in the queue. A ticket for
-- a permit waits for any of the permits. So the permits count only if all of them are held by the
-- thread or task of one waiter. Deadlocks that need several holders of permits to be stuck are not
-- found.
--
-- One query without a loop, so that Postgres puts it into the query that calls it.
CREATE OR REPLACE FUNCTION tokens_in_the_way(of_lock text, of_attempt uuid) RETURNS TABLE (token bigint)
LANGUAGE sql STABLE
AS $$
    SELECT l.token FROM distributed_locks AS l
    WHERE l.name = of_lock AND l.expires_at > clock_timestamp() AND l.forced_at IS NULL
    UNION ALL
    SELECT s.token
    FROM distributed_locks AS s
    WHERE s.head = of_lock AND s.expires_at > clock_timestamp() AND s.forced_at IS NULL
      AND CASE s.kind
          WHEN 'writer' THEN true
          WHEN 'reader' THEN EXISTS (
              SELECT FROM lock_tickets AS t
              WHERE t.name = of_lock AND t.attempt = of_attempt AND (
                  t.mode = 'write' OR EXISTS (
                      SELECT FROM lock_tickets AS o
                      JOIN lock_clients AS c ON c.client = o.client AND c.seen_until > clock_timestamp()
                      WHERE o.name = of_lock AND o.number < t.number AND o.mode = 'write'
                  )
              )
          )
          WHEN 'permit' THEN EXISTS (
              SELECT FROM waiting_holds AS w
              JOIN distributed_locks AS o
                  ON o.token = w.token AND o.head = of_lock AND o.expires_at > clock_timestamp()
                     AND o.forced_at IS NULL
              GROUP BY w.attempt
              HAVING bool_or(o.token = s.token) AND count(*) >= (
                  SELECT h.permits FROM distributed_locks AS h WHERE h.name = of_lock
              )
          )
      END
$$;
