-- Extends many leases in one statement, each under its exact token: what a client's keep-alive calls.
--
-- Every lease that is not named in `failed` now lasts for its ttl, counted from `renewed_at` or later. `failed` has the
-- places (from 1) of the others, `reasons` why: `expired` (it ran out), `superseded` (granted to another since, or long gone),
-- `released` (given back, or taken away by force), `forced` (its holder must let go; the deadline stays as it was), or
-- `busy` (another transaction is at work on the row; it may well be ours still, ask again).
--
-- It waits for no row, so that one lease whose row is in use cannot hold up the renewal of the rest. Each row is held before
-- the clock is read for it, and no deadline comes nearer; see renew(). Leases with tokens are renewed durably; where
-- there are none, nobody waits for the disk. With a `presence` the leases end, from here on, also with that.
CREATE OR REPLACE FUNCTION renew_all(
    names text[],
    tokens bigint[],
    ttls interval[],
    presence uuid DEFAULT NULL,
    OUT renewed_at timestamptz,
    OUT failed integer[],
    OUT reasons text[]
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
    ignored text;
BEGIN
    IF (cardinality(names) = cardinality(tokens) AND cardinality(names) = cardinality(ttls)) IS NOT TRUE THEN
        RAISE EXCEPTION 'renew_all takes as many names as tokens and ttls; got %, % and %.',
            cardinality(names), cardinality(tokens), cardinality(ttls)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    ready := (SELECT bool_and(check_request(a.name, a.ttl)) FROM unnest(names, ttls) AS a (name, ttl));
    IF 0 < ANY (tokens) THEN
        ready := commit_durably();
    ELSIF pg_current_xact_id_if_assigned() IS NULL THEN
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    renewed_at := clock_timestamp();
    WITH asked AS MATERIALIZED (
        SELECT a.name, a.token, make_interval(secs => date_part('epoch', a.ttl)) AS lasting, a.position
        FROM unnest(names, tokens, ttls) WITH ORDINALITY AS a (name, token, ttl, position)
    ),
    held AS MATERIALIZED (
        SELECT a.position, a.name, a.token, a.lasting
        FROM asked AS a JOIN distributed_locks AS l ON l.name = a.name AND l.token = a.token
        FOR NO KEY UPDATE OF l SKIP LOCKED
    ),
    renewed AS (
        UPDATE distributed_locks AS l
        SET expires_at = greatest(least(l.expires_at, clock_timestamp() + l.ttl), clock_timestamp() + h.lasting),
            ttl = greatest(l.ttl, h.lasting),
            presence = coalesce(renew_all.presence, l.presence)
        FROM held AS h
        WHERE l.name = h.name AND l.token = h.token AND l.expires_at > clock_timestamp()
          AND l.forced_at IS NULL
        RETURNING h.position
    )
    SELECT array_agg(a.position::integer ORDER BY a.position),
           array_agg(
               CASE
                   WHEN l.token IS DISTINCT FROM a.token THEN 'superseded'
                   WHEN l.expires_at = '-infinity' THEN 'released'
                   WHEN l.expires_at <= clock_timestamp() THEN 'expired'
                   WHEN l.forced_at IS NOT NULL THEN 'forced'
                   ELSE 'busy'
               END
               ORDER BY a.position
           )
    INTO failed, reasons
    FROM asked AS a
    LEFT JOIN distributed_locks AS l ON l.name = a.name
    WHERE a.position NOT IN (SELECT r.position FROM renewed AS r);
END
$$;
