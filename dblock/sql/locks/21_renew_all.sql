-- Extends many leases in one statement, each under its exact token. The client's keep-alive calls
-- it.
--
-- Every lease that is not in `failed` now lasts for its ttl, counted from `renewed_at` or later.
-- `failed` has the positions (from 1) of the others, and `reasons` why: `expired`, `superseded`
-- (the lock was granted again, or its row is gone), `released` (or freed by force at once),
-- `forced` (the holder must release, and the deadline stays), or `busy` (another transaction has
-- locked the row, so the lease may still be held: retry).
--
-- The statement waits for no row, so one lease whose row is locked cannot delay the renewal of the
-- rest. Each row is locked before the clock is read for it, and no deadline comes nearer: see
-- renew(). The commit is durable if one of the renewed leases has a token, and asynchronous
-- otherwise, with whatever the transaction writes afterwards. A `presence` ties the leases to that
-- session from here on.
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
    -- Whether this transaction has written nothing before.
    alone boolean := pg_current_xact_id_if_assigned() IS NULL;
BEGIN
    IF (cardinality(names) = cardinality(tokens) AND cardinality(names) = cardinality(ttls)) IS NOT TRUE THEN
        RAISE EXCEPTION 'renew_all takes as many names as tokens and ttls; got %, % and %.',
            cardinality(names), cardinality(tokens), cardinality(ttls)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    ready := (SELECT bool_and(check_request(a.name, a.ttl)) FROM unnest(names, ttls) AS a (name, ttl));
    IF 0 < ANY (tokens) THEN
        ready := commit_durably();
    ELSIF alone THEN
        -- Hot path: commit_asynchronously() inlined.
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    renewed_at := clock_timestamp();
    WITH asked AS MATERIALIZED (
        SELECT a.name, a.token, make_interval(secs => date_part('epoch', a.ttl)) AS lease_time, a.position
        FROM unnest(names, tokens, ttls) WITH ORDINALITY AS a (name, token, ttl, position)
    ),
    held AS MATERIALIZED (
        SELECT a.position, a.name, a.token, a.lease_time
        FROM asked AS a JOIN distributed_locks AS l ON l.name = a.name AND l.token = a.token
        WHERE l.expires_at > '-infinity'
        FOR NO KEY UPDATE OF l SKIP LOCKED
    ),
    renewed AS (
        UPDATE distributed_locks AS l
        SET expires_at = greatest(least(l.expires_at, clock_timestamp() + l.ttl), clock_timestamp() + h.lease_time),
            ttl = greatest(l.ttl, h.lease_time),
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
    IF alone AND cardinality(failed) = cardinality(names) THEN
        -- Nothing was renewed. The row of a lease that has just ended may be locked, and would look
        -- busy to the next holder for the time of a durable commit.
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
END
$$;
