-- What the triggers of protected tables call. They run with the rights of the table's owner, who needs these functions;
-- whoever writes to the table needs none of them.

-- Reads the token that the transaction carries: SET LOCAL fenced_store.token = '41'. NULL where it carries none, which a
-- strict fence refuses with SQLSTATE FEN02.
CREATE OR REPLACE FUNCTION carried_token(resource text, strict boolean, warn_only boolean) RETURNS bigint
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    said CONSTANT text := current_setting('fenced_store.token', true);
BEGIN
    IF said IS NULL OR said = '' THEN
        IF NOT strict THEN
            RETURN NULL;
        ELSIF warn_only THEN
            PERFORM insert_rejection(resource, NULL, NULL, NULL, NULL, NULL, NULL, NULL, false);
            RAISE WARNING 'Resource % was written by a transaction that carries no fencing token.', quote_literal(resource)
                USING HINT = 'This fence only warns; the write went through.';
            RETURN NULL;
        END IF;
        RAISE EXCEPTION 'Resource % refuses a transaction that carries no fencing token.', quote_literal(left(resource, 200))
            USING ERRCODE = 'FEN02',
            DETAIL = json_build_object('resource', resource)::text,
            HINT = 'Write inside fence(...), or say so first: SET LOCAL fenced_store.token = ''...''';
    END IF;
    IF said !~ '^[0-9]{1,19}$' OR said::numeric NOT BETWEEN 1 AND 9223372036854775807 THEN
        RAISE EXCEPTION 'fenced_store.token is %, which is no fencing token: a whole number from 1.',
            quote_literal(left(said, 100))
            USING ERRCODE = 'FEN03';
    END IF;
    RETURN said::bigint;
END
$$;

-- Checks the token of a transaction that writes a row against that row's, and against what was claimed for the row or its
-- table, or left behind by a deletion. Returns the token to store with the row; NULL to leave it as it is.
CREATE OR REPLACE FUNCTION guard_row(
    table_resource text, row_resource text, stored bigint, stored_at timestamptz, strict boolean, warn_only boolean
) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    said CONSTANT text := current_setting('fenced_store.token', true);
    offered bigint;
    way record;
    ready boolean;
BEGIN
    IF length(said) BETWEEN 1 AND 18 AND said ~ '^[0-9]+$' AND said::bigint > 0 THEN
        offered := said::bigint;  -- carried_token(), without the cost of a call
    ELSE
        offered := carried_token(row_resource, strict, warn_only);
        IF offered IS NULL THEN
            RETURN NULL;
        END IF;
    END IF;
    -- Who claims the row or its table waits for us from here on, or is done and seen below.
    ready := pg_advisory_xact_lock_shared(hashtext(table_resource), 64) IS NULL;
    ready := pg_advisory_xact_lock_shared(hashtext(table_resource), hashtext(row_resource) & 63) IS NULL;
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        -- Such a transaction sees no claim that is newer than its beginning; but it runs into it here, and fails.
        ready := check_resource(table_resource) AND check_resource(row_resource);
        INSERT INTO fences AS f (resource, token, stored_at, purgeable)
        VALUES (table_resource, 0, clock_timestamp(), true), (row_resource, 0, clock_timestamp(), true)
        ON CONFLICT DO NOTHING;
    END IF;
    SELECT f.resource, f.token, f.stored_at, f.stored_by INTO way
    FROM fences AS f
    WHERE f.resource IN (table_resource, row_resource) AND f.token > greatest(offered, stored)
    ORDER BY f.token DESC LIMIT 1;
    IF FOUND THEN
        PERFORM refuse(way.resource, offered, way.token, way.stored_at, way.stored_by, warn_only);
        RETURN NULL;
    END IF;
    IF offered < stored THEN
        PERFORM refuse(row_resource, offered, stored, guard_row.stored_at, NULL, warn_only);
        RETURN NULL;
    END IF;
    RETURN offered;
END
$$;

-- Leaves a fence behind for a row that is deleted or renamed.
CREATE OR REPLACE FUNCTION preserve_fence(row_resource text, token bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
BEGIN
    IF preserve_fence.token > 0 THEN
        ready := check_resource(row_resource);
        INSERT INTO fences AS f (resource, token, stored_at, stored_by, purgeable)
        VALUES (row_resource, preserve_fence.token, clock_timestamp(), left(describe_session(), 512), true)
        ON CONFLICT (resource) DO UPDATE
        SET token = excluded.token, write_number = 0, stored_at = excluded.stored_at, stored_by = excluded.stored_by
        WHERE f.token < excluded.token;
    END IF;
END
$$;

-- Tells the token of the fence that stands for a row, for one that is put back without a token of its own; 0 for none.
CREATE OR REPLACE FUNCTION current_fence(row_resource text) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT coalesce(max(f.token), 0) FROM fences AS f WHERE f.resource = row_resource
$$;

-- Returns the highest token of all fences that stand for rows of a table, or for the table; 0 for none.
CREATE OR REPLACE FUNCTION highest_fence(table_resource text) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT coalesce(max(f.token), 0)
    FROM fences AS f
    -- A semicolon comes right after a colon: so this is a range of the index.
    WHERE f.resource = table_resource OR (f.resource > table_resource || ':' AND f.resource < table_resource || ';')
$$;

-- Takes the fence of a table as a whole with the token that the transaction carries.
CREATE OR REPLACE FUNCTION guard_table(table_resource text, strict boolean, warn_only boolean) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    offered CONSTANT bigint := carried_token(table_resource, strict, warn_only);
    way record;
BEGIN
    IF offered IS NULL THEN
        RETURN;
    END IF;
    SELECT f.token, f.stored_at, f.stored_by, f.xmin INTO way FROM fences AS f WHERE f.resource = table_resource;
    IF FOUND AND way.token = offered AND way.xmin = pg_current_xact_id_if_assigned()::xid THEN
        RETURN;  -- taken before in this transaction
    END IF;
    IF NOT warn_only THEN
        PERFORM raise_fence(table_resource, offered);
        RETURN;
    END IF;
    BEGIN
        PERFORM raise_fence(table_resource, offered);
    EXCEPTION WHEN SQLSTATE 'FEN01' THEN
        SELECT f.token, f.stored_at, f.stored_by INTO way FROM fences AS f WHERE f.resource = table_resource;
        PERFORM refuse(table_resource, offered, way.token, way.stored_at, way.stored_by, true);
    END;
END
$$;

-- Checks the token of a transaction that empties a table which is protected row by row: it must not be lower than that of any
-- row, `highest` among those that are there, nor than any fence that stands for one. Whatever it carries, the highest stays
-- with the table's own fence.
CREATE OR REPLACE FUNCTION guard_truncate(
    table_resource text, highest bigint, strict boolean, warn_only boolean
) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
DECLARE
    offered CONSTANT bigint := carried_token(table_resource, strict, warn_only);
    above bigint;
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'Table % is protected row by row, so it is emptied in a READ COMMITTED transaction only.', table_resource
            USING ERRCODE = 'feature_not_supported',
            HINT = 'Under another isolation the tokens of its newest rows could not be seen. DELETE works under all of them.';
    END IF;
    -- Claims of rows wait for us from here on, or are done and seen below.
    PERFORM pg_advisory_xact_lock(hashtext(table_resource), 64);
    above := greatest(highest, highest_fence(table_resource));
    IF offered < above THEN
        PERFORM refuse(table_resource, offered, above, NULL, NULL, warn_only);
    ELSIF offered IS NOT NULL THEN
        PERFORM raise_fence(table_resource, offered);
        RETURN;
    END IF;
    PERFORM preserve_fence(table_resource, above);
END
$$;

-- The trigger of a table that is protected as a whole. Its arguments: the resource, whether strict, whether it only warns.
CREATE OR REPLACE FUNCTION guard_table_trigger() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM guard_table(TG_ARGV[0], TG_ARGV[1]::boolean, TG_ARGV[2]::boolean);
    IF TG_LEVEL = 'STATEMENT' THEN
        RETURN NULL;
    END IF;
    RETURN coalesce(NEW, OLD);
END
$$;
