-- Returns the token that the transaction carries: SET LOCAL fenced_store.token = '41'. NULL means
-- that it carries none, which a strict fence refuses with SQLSTATE FEN02.
CREATE OR REPLACE FUNCTION carried_token(resource text, strict boolean, warn_only boolean) RETURNS bigint
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    carried CONSTANT text := current_setting('fenced_store.token', true);
BEGIN
    IF carried IS NULL OR carried = '' THEN
        IF NOT strict THEN
            RETURN NULL;
        ELSIF warn_only THEN
            PERFORM insert_rejection(resource, NULL, NULL, NULL, NULL, NULL, NULL, NULL, false);
            RAISE WARNING 'Resource % was written by a transaction that carries no fencing token.',
                quote_literal(resource)
                USING HINT = 'This fence only warns. The write was accepted.';
            RETURN NULL;
        END IF;
        RAISE EXCEPTION 'Resource % refuses a transaction that carries no fencing token.',
            quote_literal(left(resource, 200))
            USING ERRCODE = 'FEN02',
            DETAIL = json_build_object('resource', resource)::text,
            HINT = 'Write inside fence(...), or set the token first: SET LOCAL fenced_store.token = ''...''';
    END IF;
    IF carried !~ '^[0-9]{1,19}$' OR carried::numeric NOT BETWEEN 1 AND 9223372036854775807 THEN
        RAISE EXCEPTION 'fenced_store.token is %, which is not a fencing token: a whole number from 1.',
            quote_literal(left(carried, 100))
            USING ERRCODE = 'FEN03';
    END IF;
    RETURN carried::bigint;
END
$$;

-- Returns whether a version of a row was written by the current transaction. The version must be
-- visible, and at most two billion transactions old.
CREATE OR REPLACE FUNCTION is_own_version(version xid) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    own CONSTANT bigint := pg_current_xact_id_if_assigned()::text;
    -- The numbers of subtransactions follow that of their transaction.
    distance CONSTANT bigint := (version::text::bigint - own) & 4294967295;
BEGIN
    RETURN coalesce(
        distance = 0 OR distance < 2147483648 AND pg_xact_status((own + distance)::text::xid8) = 'in progress', false
    );
END
$$;

-- Fails a statement whose snapshot is older than the last transaction that had the fence of its
-- table. The statement would overwrite what that transaction has committed. `seen` is the version
-- of the fence that the statement sees.
CREATE OR REPLACE FUNCTION check_snapshot(table_resource text, seen xid) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    latest CONSTANT xid := f.xmin FROM fences AS f WHERE f.resource = table_resource;
BEGIN
    IF latest = seen OR is_own_version(latest) THEN
        RETURN;
    END IF;
    RAISE EXCEPTION 'Another transaction took the fence of % and committed after this statement began. Retry the transaction.',
        quote_literal(left(table_resource, 200))
        USING ERRCODE = 'serialization_failure',
        DETAIL = 'The statement does not see what that transaction wrote.',
        HINT = format(
            'To wait instead, take the fence first, in a statement of its own: SELECT %I.raise_fence(%L, token)',
            current_schema(), table_resource
        );
END
$$;

-- The triggers call the functions up to here, guard_row() and guard_table() with the privileges of
-- the schema's owner. No application role may call them.

-- Checks the token of a transaction that writes a row against the token of the row, and against the
-- fences of the row and its table, which a claim or a deletion may have raised. Returns the token
-- to store with the row. NULL means that the row keeps its token. A negative token means that the
-- caller has to call check_snapshot(). The caller has passed the gates of the row. `oldest` is the
-- oldest transaction that ran when the writing statement began.
CREATE OR REPLACE FUNCTION guard_row(
    table_resource text, row_resource text, stored bigint, stored_at timestamptz, strict boolean, warn_only boolean,
    oldest xid
) RETURNS bigint
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    carried CONSTANT text := current_setting('fenced_store.token', true);
    offered bigint;
    fence record;
    ready boolean;
BEGIN
    IF length(carried) BETWEEN 1 AND 18 AND carried ~ '^[0-9]+$' AND carried::bigint > 0 THEN
        offered := carried::bigint;  -- hot path: carried_token() inlined
    ELSE
        offered := carried_token(row_resource, strict, warn_only);
        IF offered IS NULL THEN
            RETURN NULL;
        END IF;
    END IF;
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        -- A transaction with an older snapshot does not see newer claims and deletions. It
        -- conflicts with their fences here, and fails. It leaves no fence of its own.
        ready := check_resource(table_resource) AND check_resource(row_resource);
        INSERT INTO fences AS f (resource, token, stored_at, purgeable)
        VALUES (table_resource, 0, clock_timestamp(), true)
        ON CONFLICT DO NOTHING;
        INSERT INTO fences AS f (resource, token, stored_at, purgeable)
        VALUES (row_resource, 0, clock_timestamp(), true)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            DELETE FROM fences AS f WHERE f.resource = row_resource;
        END IF;
    END IF;
    SELECT f.resource, f.token, f.stored_at, f.stored_by, f.xmin INTO fence
    FROM fences AS f
    WHERE f.resource IN (table_resource, row_resource)
      AND (
          f.token > greatest(offered, stored)
          -- The statement sees every version of a fence that is older than that.
          OR f.resource = table_resource AND age(f.xmin) <= age(oldest)
      )
    ORDER BY f.token DESC LIMIT 1;
    IF FOUND THEN
        IF fence.token > greatest(offered, stored) THEN
            PERFORM refuse(fence.resource, offered, fence.token, fence.stored_at, fence.stored_by, warn_only);
            RETURN NULL;
        END IF;
    END IF;
    IF offered < stored THEN
        PERFORM refuse(row_resource, offered, stored, guard_row.stored_at, NULL, warn_only);
        RETURN NULL;
    END IF;
    RETURN CASE WHEN fence.token IS NULL OR warn_only THEN offered ELSE -offered END;
END
$$;

-- Takes the fence of a whole table with the token that the transaction carries. With `reads`, the
-- writing statement reads the table, and `seen` is the version of the fence that it sees.
CREATE OR REPLACE FUNCTION guard_table(
    table_resource text, strict boolean, warn_only boolean, reads boolean, seen xid
) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    offered CONSTANT bigint := carried_token(table_resource, strict, warn_only);
    fence record;
BEGIN
    IF offered IS NULL THEN
        RETURN;
    END IF;
    SELECT f.token, f.xmin INTO fence FROM fences AS f WHERE f.resource = table_resource;
    IF FOUND AND fence.token = offered AND is_own_version(fence.xmin) THEN
        RETURN;  -- this transaction has taken the fence before
    END IF;
    -- The table cannot be protected in another way before this transaction ends, because the
    -- transaction writes to the table. So neither hold_protection() nor a gate is needed.
    IF NOT warn_only THEN
        IF NOT write_fence(table_resource, offered, 0, NULL, reads, seen) THEN
            PERFORM check_snapshot(table_resource, seen);
            PERFORM write_fence(table_resource, offered, 0, NULL);
        END IF;
        RETURN;
    END IF;
    BEGIN
        PERFORM write_fence(table_resource, offered, 0, NULL);
    EXCEPTION WHEN SQLSTATE 'FEN01' THEN
        SELECT f.token, f.stored_at, f.stored_by INTO fence FROM fences AS f WHERE f.resource = table_resource;
        PERFORM refuse(table_resource, offered, fence.token, fence.stored_at, fence.stored_by, true);
    END;
END
$$;

-- Checks the token of a TRUNCATE of a table that is protected per row. It must not be lower than
-- the token of any row (`highest` is the highest of them), nor than any fence of the table or its
-- rows. Whatever token the transaction carries, the table's own fence keeps the highest.
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
        RAISE EXCEPTION 'Table % is protected per row, so TRUNCATE needs a READ COMMITTED transaction.', table_resource
            USING ERRCODE = 'feature_not_supported',
            HINT = 'A stricter isolation level hides the tokens of the newest rows. DELETE works at every level.';
    END IF;
    IF to_regclass(format('%I.%s', current_schema(), gate_of(table_resource, table_resource))) IS NULL THEN
        RAISE EXCEPTION 'No table % is protected per row.', quote_nullable(table_resource)
            USING ERRCODE = 'invalid_parameter_value',
            HINT = 'Only the trigger of a protected table calls guard_truncate().';
    END IF;
    -- From here on a claim of a row waits for this transaction, or has committed and is seen below.
    PERFORM lock_gate(table_resource, table_resource);
    above := greatest(highest, highest_fence(table_resource));
    IF offered < above THEN
        PERFORM refuse(table_resource, offered, above, NULL, NULL, warn_only);
    ELSIF offered IS NOT NULL THEN
        PERFORM write_fence(table_resource, offered, 0, NULL);
        RETURN;
    END IF;
    PERFORM preserve_fence(table_resource, above);
END
$$;

-- The trigger of a table that is protected as a whole. Its arguments are the resource, whether the
-- fence is strict, and whether it only warns.
--
-- It is STABLE, so that it reads the fence with the snapshot of the statement that fired it. The
-- functions that it calls are volatile and read the latest version.
CREATE OR REPLACE FUNCTION guard_table_trigger() RETURNS trigger
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM guard_table(
        TG_ARGV[0], TG_ARGV[1]::boolean, TG_ARGV[2]::boolean, TG_OP <> 'TRUNCATE',
        (SELECT f.xmin FROM fences AS f WHERE f.resource = TG_ARGV[0])
    );
    IF TG_LEVEL = 'STATEMENT' THEN
        RETURN NULL;
    END IF;
    RETURN coalesce(NEW, OLD);
END
$$;

-- The TRUNCATE trigger of a table that is protected per row, with the same arguments. It runs as
-- the role that truncates the table, which must own it.
CREATE OR REPLACE FUNCTION guard_truncate_trigger() RETURNS trigger
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM guard_truncate(TG_ARGV[0], highest_token(TG_RELID), TG_ARGV[1]::boolean, TG_ARGV[2]::boolean);
    RETURN NULL;
END
$$;
