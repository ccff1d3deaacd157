-- Takes the fence of a resource in the transaction under way: raises it to this token, or refuses the token with SQLSTATE
-- FEN01. Until the transaction ends, nobody else gets past this fence, so what two holders do is one after the other.
--
-- The row is written even where the token is the same as before: a transaction of an isolation that shows it nothing newer
-- than its beginning then fails here, rather than work on what it saw before the other one's commit.
CREATE OR REPLACE FUNCTION raise_fence(
    resource text, token bigint, write_number bigint DEFAULT 0, who text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := check_resource(raise_fence.resource) AND check_token(raise_fence.resource, raise_fence.token);
    found_there record;
BEGIN
    INSERT INTO fences AS f (resource, token, write_number, stored_at, stored_by)
    VALUES (
        raise_fence.resource, raise_fence.token, raise_fence.write_number, clock_timestamp(),
        left(coalesce(raise_fence.who, describe_session()), 512)
    )
    ON CONFLICT (resource) DO UPDATE SET
        token = excluded.token,
        write_number = CASE
            WHEN f.token = excluded.token THEN greatest(f.write_number, excluded.write_number)
            ELSE excluded.write_number
        END,
        stored_at = clock_timestamp(),
        stored_by = excluded.stored_by,
        left_behind = false
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

-- Waits for those who are at work on rows of a protected table, if these resources are such rows or tables, and keeps others
-- out until the end of the transaction. Rows share 64 gates among all of them, because each one held takes memory that all
-- sessions share, and a statement may write a million rows. guard() goes through the same gates.
CREATE OR REPLACE FUNCTION hold_gates(resources text[]) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    gate integer;
BEGIN
    FOR gate IN SELECT DISTINCT hashtext(r) FROM unnest(resources) AS r ORDER BY 1 LOOP
        PERFORM pg_advisory_xact_lock(1717921396, gate);
    END LOOP;
    FOR gate IN SELECT DISTINCT hashtext(r) & 63 FROM unnest(resources) AS r ORDER BY 1 LOOP
        PERFORM pg_advisory_xact_lock(1717921395, gate);
    END LOOP;
END
$$;

-- Claims resources for a token that was just granted: whoever comes with a lower one is refused from now on, before
-- anything was written with this one. Waits for the transactions that are past these fences already, writers of protected
-- rows among them. Claiming again with the same token changes nothing.
--
-- A fence that stands higher than the token means that tokens have gone back, and refuses with SQLSTATE FEN04.
CREATE OR REPLACE FUNCTION claim(resources text[], token bigint, who text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    one text;
    stands bigint;
    ready boolean := commit_durably();
BEGIN
    -- Everything in one order for all, so that no two claims wait for each other.
    PERFORM hold_gates(claim.resources);
    FOR one IN SELECT DISTINCT r COLLATE "C" FROM unnest(claim.resources) AS r ORDER BY 1 LOOP
        ready := check_resource(one) AND check_token(one, claim.token);
        INSERT INTO fences AS f (resource, token, stored_at, stored_by)
        VALUES (one, claim.token, clock_timestamp(), left(coalesce(claim.who, describe_session()), 512))
        ON CONFLICT (resource) DO UPDATE SET
            token = excluded.token,
            write_number = 0,
            stored_at = excluded.stored_at,
            stored_by = excluded.stored_by,
            left_behind = false
        WHERE f.token < excluded.token;
        IF NOT FOUND THEN
            SELECT f.token INTO stands FROM fences AS f WHERE f.resource = one;
            IF stands > claim.token THEN
                RAISE EXCEPTION 'The fence of resource % stands at token %, above the token % that was just granted.',
                    quote_literal(left(one, 200)), stands, claim.token
                    USING ERRCODE = 'FEN04',
                    HINT = format(
                        'Tokens have gone back, by a restore perhaps. Raise them: dblock token raise --above %s', stands
                    );
            END IF;
        END IF;
    END LOOP;
END
$$;
