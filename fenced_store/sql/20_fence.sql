-- Takes the fence of a resource in the transaction under way: raises it to this token, or refuses the token with SQLSTATE
-- FEN01. Until the transaction ends, nobody else gets past this fence, so what two holders do is one after the other.
--
-- The row is written even where the token is the same as before: a transaction of an isolation that shows it nothing newer
-- than its beginning then fails here, rather than work on what it saw before the other one's commit.
CREATE OR REPLACE FUNCTION raise_fence(
    resource text, token bigint, write_number bigint DEFAULT 0, writer text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := check_resource(raise_fence.resource) AND check_token(raise_fence.resource, raise_fence.token);
    found_there record;
    table_resource text;
BEGIN
    SELECT p.resource INTO table_resource
    FROM protections AS p
    WHERE p.per = 'row' AND (raise_fence.resource = p.resource OR starts_with(raise_fence.resource, p.resource || ':'));
    IF FOUND THEN
        PERFORM lock_gate(table_resource, raise_fence.resource);
    END IF;
    INSERT INTO fences AS f (resource, token, write_number, stored_at, stored_by)
    VALUES (
        raise_fence.resource, raise_fence.token, coalesce(raise_fence.write_number, 0), clock_timestamp(),
        left(coalesce(raise_fence.writer, describe_session()), 512)
    )
    ON CONFLICT (resource) DO UPDATE SET
        token = excluded.token,
        write_number = CASE
            WHEN f.token = excluded.token THEN greatest(f.write_number, excluded.write_number)
            ELSE excluded.write_number
        END,
        stored_at = clock_timestamp(),
        stored_by = excluded.stored_by,
        value_token = coalesce(f.value_token, f.token),
        value_at = coalesce(f.value_at, f.stored_at),
        value_by = coalesce(f.value_by, f.stored_by),
        purgeable = false
    WHERE f.token <= excluded.token;
    IF NOT FOUND THEN
        SELECT f.token, f.stored_at, f.stored_by INTO found_there
        FROM fences AS f WHERE f.resource = raise_fence.resource;
        PERFORM refuse(
            raise_fence.resource, raise_fence.token, found_there.token, found_there.stored_at, found_there.stored_by, false
        );
    END IF;
END
$$;

-- Waits for those who are at work on a row or a table that is protected row by row, and keeps others out until the end of
-- the transaction. guard_row() goes through the same gates: 64 for the rows of a table, which share them because each one held
-- takes memory that all sessions share, and a statement may write a million rows; and one for the table.
CREATE OR REPLACE FUNCTION lock_gate(table_resource text, resource text) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    IF resource = table_resource THEN
        PERFORM pg_advisory_xact_lock(hashtext(table_resource), 64);
    ELSE
        PERFORM pg_advisory_xact_lock_shared(hashtext(table_resource), 64);
        PERFORM pg_advisory_xact_lock(hashtext(table_resource), hashtext(resource) & 63);
    END IF;
END
$$;

-- Claims resources for a token that was just granted: whoever comes with a lower one is refused from now on, before
-- anything was written with this one. Waits for the transactions that are past these fences already, writers of protected
-- rows among them. Claiming again with the same token changes nothing.
--
-- `patience` bounds the waiting, in seconds; a longer one is an error, lock_not_available, and nothing is claimed. A fence that
-- stands higher refuses with SQLSTATE FEN04: another was granted the lock since, or tokens have gone back.
CREATE OR REPLACE FUNCTION claim(
    resources text[], token bigint, writer text DEFAULT NULL, patience double precision DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    one record;
    stands bigint;
    ready boolean := commit_durably();
    ignored text;
    before CONSTANT text := current_setting('lock_timeout');
    gives_up timestamptz;
BEGIN
    -- As far as a lock_timeout goes. What is not a number counts as more than all numbers.
    IF claim.patience > 2147483 THEN
        RAISE EXCEPTION 'A claim waits for at most 2147483 seconds, some 24 days; got %.', claim.patience
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF claim.patience IS NOT NULL THEN
        claim.patience := greatest(claim.patience, 0);
        gives_up := clock_timestamp() + make_interval(secs => claim.patience);
        ignored := set_config('lock_timeout', greatest(round(claim.patience * 1000), 1)::text || 'ms', true);
    END IF;
    -- Whoever changes what is protected waits for us, or is done and seen below.
    LOCK TABLE protections IN ROW SHARE MODE;
    -- In one order for all, so that no two claims wait for each other; gates last, as those who write inside a fence
    -- come to them.
    FOR one IN
        SELECT r.resource, p.resource AS table_resource
        FROM (SELECT DISTINCT u COLLATE "C" AS resource FROM unnest(claim.resources) AS u) AS r
        LEFT JOIN LATERAL (
            SELECT o.resource FROM protections AS o
            WHERE o.per = 'row' AND (r.resource = o.resource OR starts_with(r.resource, o.resource || ':'))
            ORDER BY length(o.resource) DESC LIMIT 1
        ) AS p ON true
        ORDER BY p.resource IS NOT NULL, p.resource, r.resource <> p.resource, hashtext(r.resource) & 63, r.resource
    LOOP
        ready := check_resource(one.resource) AND check_token(one.resource, claim.token);
        IF claim.patience IS NOT NULL THEN
            ignored := set_config(
                'lock_timeout',
                greatest(round(date_part('epoch', gives_up - clock_timestamp()) * 1000), 1)::text || 'ms', true
            );
        END IF;
        IF one.table_resource IS NOT NULL THEN
            PERFORM lock_gate(one.table_resource, one.resource);
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
            SELECT f.token INTO stands FROM fences AS f WHERE f.resource = one.resource;
            IF stands > claim.token THEN
                RAISE EXCEPTION 'Resource % refuses to be claimed with token %: its fence stands at token %.',
                    quote_literal(left(one.resource, 200)), claim.token, stands
                    USING ERRCODE = 'FEN04',
                    DETAIL = json_build_object('resource', one.resource, 'offered', claim.token, 'stored', stands)::text,
                    HINT = format(
                        'If another was granted the lock since, acquire it anew. If not, tokens have gone back, by a restore'
                        ' perhaps: raise them above, with dblock by: dblock token raise --above %s', stands
                    );
            END IF;
        END IF;
    END LOOP;
    IF claim.patience IS NOT NULL THEN
        ignored := set_config('lock_timeout', before, true);
    END IF;
END
$$;
