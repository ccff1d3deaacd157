-- Frees many locks in one statement, each only if its exact grant still holds it. A client calls it
-- when it closes, and for leases that its program has dropped.
--
-- It waits for no row. `busy` has the positions (from 1) of the locks whose row another transaction
-- has locked: retry these. In its own transaction it commits asynchronously, like release().
CREATE OR REPLACE FUNCTION release_all(names text[], tokens bigint[], OUT released integer, OUT busy integer[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
    queued text[];
    heads text[];
    one text;
BEGIN
    ready := commit_asynchronously();
    WITH asked AS MATERIALIZED (
        SELECT a.name, a.token, a.position FROM unnest(names, tokens) WITH ORDINALITY AS a (name, token, position)
    ),
    held AS MATERIALIZED (
        SELECT a.position, a.name, a.token
        FROM asked AS a JOIN distributed_locks AS l ON l.name = a.name AND l.token = a.token
        WHERE l.expires_at > '-infinity'
        FOR NO KEY UPDATE OF l SKIP LOCKED
    ),
    freed AS (
        UPDATE distributed_locks AS l
        SET expires_at = '-infinity', released_at = clock_timestamp(), attempt = NULL, holder = NULL, meta = NULL
        FROM held AS h
        WHERE l.name = h.name AND l.token = h.token AND l.expires_at > clock_timestamp()
        RETURNING h.position, l.name, l.waiting, l.head
    )
    SELECT (SELECT count(*) FROM freed),
           (SELECT array_agg(f.name ORDER BY f.name) FROM freed AS f WHERE f.waiting),
           (SELECT array_agg(DISTINCT f.head) FROM freed AS f WHERE f.head IS NOT NULL),
           array_agg(a.position::integer ORDER BY a.position) FILTER (
               WHERE l.token = a.token AND l.expires_at > clock_timestamp()
                 AND a.position NOT IN (SELECT h.position FROM held AS h)
           )
    INTO released, queued, heads, busy
    FROM asked AS a
    LEFT JOIN distributed_locks AS l ON l.name = a.name;
    FOREACH one IN ARRAY coalesce(queued, '{}') LOOP
        PERFORM wake_next(one);
    END LOOP;
    FOREACH one IN ARRAY coalesce(heads, '{}') LOOP
        PERFORM wake_shared(one);
    END LOOP;
END
$$;
