-- Returns the cycle of waits through a ticket as JSON, NULL if there is none, and the youngest
-- ticket of the cycle: the one that joined its queue last.
CREATE OR REPLACE FUNCTION describe_cycle(
    name text,
    attempt uuid,
    OUT waits jsonb,
    OUT attempts uuid[],
    OUT youngest uuid,
    OUT youngest_client uuid,
    OUT through_sessions boolean
)
LANGUAGE sql VOLATILE
AS $$
    SELECT jsonb_agg(
               jsonb_build_object(
                   'waiter', c.waiter, 'lock', c.lock, 'holder', c.holder,
                   -- A grant that is not durable has no fencing token.
                   'token', CASE WHEN c.token > 0 THEN c.token END, 'session', c.session, 'blocker', c.blocker
               )
               ORDER BY c.place
           ),
           array_agg(c.attempt) FILTER (WHERE c.attempt IS NOT NULL),
           (array_agg(c.attempt ORDER BY c.since DESC, c.attempt DESC) FILTER (WHERE c.attempt IS NOT NULL))[1],
           (array_agg(c.client ORDER BY c.since DESC, c.attempt DESC) FILTER (WHERE c.attempt IS NOT NULL))[1],
           coalesce(bool_or(c.session IS NOT NULL), false)
    FROM find_cycle(describe_cycle.name, describe_cycle.attempt) WITH ORDINALITY
        AS c (waiter, lock, holder, token, session, blocker, attempt, client, since, place)
$$;
