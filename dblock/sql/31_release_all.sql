-- Frees many locks in one statement, each only if its exact grant still holds it; what a client calls at its end, and for
-- leases that nobody has in hand any more.
--
-- It waits for no row. `busy` has the places (from 1) of those whose row another transaction is at work on: ask again.
-- Commits asynchronously where it stands alone, as release() does.
CREATE OR REPLACE FUNCTION release_all(names text[], tokens bigint[], OUT released integer, OUT busy integer[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ignored text;
    awaited text[];
    one text;
BEGIN
    IF pg_current_xact_id_if_assigned() IS NULL THEN
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    WITH asked AS MATERIALIZED (
        SELECT a.name, a.token, a.position FROM unnest(names, tokens) WITH ORDINALITY AS a (name, token, position)
    ),
    held AS MATERIALIZED (
        SELECT a.position, a.name, a.token
        FROM asked AS a JOIN distributed_locks AS l ON l.name = a.name AND l.token = a.token
        FOR NO KEY UPDATE OF l SKIP LOCKED
    ),
    freed AS (
        UPDATE distributed_locks AS l
        SET expires_at = '-infinity', released_at = clock_timestamp(), attempt = NULL, holder = NULL, meta = NULL
        FROM held AS h
        WHERE l.name = h.name AND l.token = h.token AND l.expires_at > clock_timestamp()
        RETURNING h.position, l.name, l.waiting
    )
    SELECT (SELECT count(*) FROM freed),
           (SELECT array_agg(f.name ORDER BY f.name) FROM freed AS f WHERE f.waiting),
           array_agg(a.position::integer ORDER BY a.position) FILTER (
               WHERE l.token = a.token AND l.expires_at > clock_timestamp() AND a.position NOT IN (SELECT position FROM held)
           )
    INTO released, awaited, busy
    FROM asked AS a
    LEFT JOIN distributed_locks AS l ON l.name = a.name;
    FOREACH one IN ARRAY coalesce(awaited, '{}') LOOP
        PERFORM wake_next(one);
    END LOOP;
END
$$;
