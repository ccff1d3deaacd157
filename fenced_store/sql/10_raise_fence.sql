-- Takes the fence of a resource in the current transaction: raises it to this token, or refuses the
-- token with SQLSTATE FEN01. Until the transaction ends, no other transaction passes this fence, so
-- the work of two holders is serialized.
--
-- The row is written even if the token stays the same. A transaction with an older snapshot then
-- fails here, instead of working on data from before the other transaction's commit.
CREATE OR REPLACE FUNCTION raise_fence(
    resource text, token bigint, write_number bigint DEFAULT 0, writer text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := check_resource(raise_fence.resource) AND check_token(raise_fence.resource, raise_fence.token);
    stored record;
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
        SELECT f.token, f.stored_at, f.stored_by INTO stored
        FROM fences AS f WHERE f.resource = raise_fence.resource;
        PERFORM refuse(
            raise_fence.resource, raise_fence.token, stored.token, stored.stored_at, stored.stored_by, false
        );
    END IF;
END
$$;
