-- Claims resources for a token that was just granted: from now on they refuse a lower token, before
-- anything was written with this one. Waits for the transactions that have already passed these
-- fences, including writers of protected rows. A second claim with the same token changes nothing.
--
-- `patience` limits the wait, in seconds. When it is over, the claim raises lock_not_available and
-- claims nothing. A fence at a higher token refuses with SQLSTATE FEN04: the lock was granted
-- again, or tokens have gone back.
CREATE OR REPLACE FUNCTION claim(
    resources text[], token bigint, writer text DEFAULT NULL, patience double precision DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    one record;
    stored bigint;
    ready boolean := commit_durably();
    ignored text;
    lock_timeout_before CONSTANT text := current_setting('lock_timeout');
    gives_up timestamptz;
BEGIN
    -- The limit of lock_timeout. NaN compares as greater than every number.
    IF claim.patience > 2147483 THEN
        RAISE EXCEPTION 'A claim waits for at most 2147483 seconds (24 days); got %.', claim.patience
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF claim.patience IS NOT NULL THEN
        claim.patience := greatest(claim.patience, 0);
        gives_up := clock_timestamp() + make_interval(secs => claim.patience);
        ignored := set_config('lock_timeout', greatest(round(claim.patience * 1000), 1)::text || 'ms', true);
    END IF;
    -- All claims take their fences in the same order, so no two of them deadlock. Gates come last,
    -- as they do for a transaction that writes inside a fence.
    FOR one IN
        SELECT DISTINCT table_of(u) COLLATE "C" AS table_resource FROM unnest(claim.resources) AS u
        WHERE table_of(u) IS NOT NULL ORDER BY 1
    LOOP
        -- A transaction that protects this table waits for this claim, or has committed and is seen
        -- below.
        IF claim.patience IS NOT NULL THEN
            ignored := set_config(
                'lock_timeout',
                greatest(round(date_part('epoch', gives_up - clock_timestamp()) * 1000), 1)::text || 'ms', true
            );
        END IF;
        PERFORM hold_protection(one.table_resource);
    END LOOP;
    FOR one IN
        SELECT r.resource, p.resource AS table_resource
        FROM (SELECT DISTINCT u COLLATE "C" AS resource FROM unnest(claim.resources) AS u) AS r
        LEFT JOIN protections AS p ON p.resource = table_of(r.resource) AND p.per = 'row'
        ORDER BY p.resource IS NOT NULL, p.resource, r.resource <> p.resource, hashtext(r.resource) & 31, r.resource
    LOOP
        ready := check_resource(one.resource) AND check_token(one.resource, claim.token);
        IF claim.patience IS NOT NULL THEN
            ignored := set_config(
                'lock_timeout',
                greatest(round(date_part('epoch', gives_up - clock_timestamp()) * 1000), 1)::text || 'ms', true
            );
        END IF;
        IF one.table_resource IS NOT NULL THEN
            PERFORM lock_gate(one.table_resource, one.resource, gives_up);
            IF claim.patience IS NOT NULL THEN
                ignored := set_config(
                    'lock_timeout',
                    greatest(round(date_part('epoch', gives_up - clock_timestamp()) * 1000), 1)::text || 'ms', true
                );
            END IF;
        END IF;
        INSERT INTO fences AS f (resource, token, stored_at, stored_by)
        VALUES (one.resource, claim.token, clock_timestamp(), left(coalesce(claim.writer, describe_session()), 512))
        ON CONFLICT (resource) DO UPDATE SET
            token = excluded.token,
            write_number = CASE WHEN f.token = excluded.token THEN f.write_number ELSE 0 END,
            stored_at = excluded.stored_at,
            stored_by = excluded.stored_by,
            value_token = coalesce(f.value_token, f.token),
            value_at = coalesce(f.value_at, f.stored_at),
            value_by = coalesce(f.value_by, f.stored_by),
            purgeable = false
        WHERE f.token < excluded.token OR f.token = excluded.token AND f.purgeable;
        IF NOT FOUND THEN
            SELECT f.token INTO stored FROM fences AS f WHERE f.resource = one.resource;
            IF stored > claim.token THEN
                RAISE EXCEPTION 'Resource % refuses to be claimed with token %: its fence is at token %.',
                    quote_literal(left(one.resource, 200)), claim.token, stored
                    USING ERRCODE = 'FEN04',
                    DETAIL = json_build_object(
                        'resource', one.resource, 'offered', claim.token, 'stored', stored
                    )::text,
                    HINT = format(
                        'If the lock was granted again since, acquire it again. If not, tokens have gone back,'
                        ' for example after a restore. Raise them. With dblock: dblock token raise --above %s', stored
                    );
            END IF;
        END IF;
    END LOOP;
    IF claim.patience IS NOT NULL THEN
        ignored := set_config('lock_timeout', lock_timeout_before, true);
    END IF;
END
$$;
