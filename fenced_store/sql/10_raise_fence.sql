-- Raises a fence to this token, or refuses the token with SQLSTATE FEN01. With `checks`, it returns
-- false and changes nothing if the fence is not at the version `seen`: another transaction has
-- taken the fence since. No application role may call it.
--
-- The row is written even if the token stays the same. A transaction with an older snapshot then
-- fails here, instead of working on data from before the other transaction's commit.
CREATE OR REPLACE FUNCTION write_fence(
    resource text, token bigint, write_number bigint, writer text, checks boolean DEFAULT false, seen xid DEFAULT NULL
) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    stored record;
BEGIN
    INSERT INTO fences AS f (resource, token, write_number, stored_at, stored_by)
    VALUES (
        write_fence.resource, write_fence.token, coalesce(write_fence.write_number, 0), clock_timestamp(),
        left(coalesce(write_fence.writer, describe_session()), 512)
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
    WHERE f.token <= excluded.token AND (NOT write_fence.checks OR f.xmin = write_fence.seen);
    IF FOUND THEN
        RETURN true;
    END IF;
    SELECT f.token, f.stored_at, f.stored_by INTO stored FROM fences AS f WHERE f.resource = write_fence.resource;
    IF stored.token <= write_fence.token THEN
        RETURN false;
    END IF;
    PERFORM refuse(write_fence.resource, write_fence.token, stored.token, stored.stored_at, stored.stored_by, false);
END
$$;

-- Takes the fence of a resource in the current transaction: raises it to this token, or refuses the
-- token with SQLSTATE FEN01. Until the transaction ends, no other transaction passes this fence, so
-- the work of two holders is serialized.
CREATE OR REPLACE FUNCTION raise_fence(
    resource text, token bigint, write_number bigint DEFAULT 0, writer text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := check_resource(raise_fence.resource) AND check_token(raise_fence.resource, raise_fence.token);
    table_resource CONSTANT text := table_of(raise_fence.resource);
BEGIN
    IF table_resource IS NOT NULL THEN
        PERFORM hold_protection(table_resource);
        IF EXISTS (SELECT FROM protections AS p WHERE p.resource = table_resource AND p.per = 'row') THEN
            PERFORM lock_gate(table_resource, raise_fence.resource);
        END IF;
    END IF;
    PERFORM write_fence(raise_fence.resource, raise_fence.token, raise_fence.write_number, raise_fence.writer);
END
$$;
