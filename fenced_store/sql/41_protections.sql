-- The record of protected tables. Functions that change a table run with the privileges of the
-- caller, who must own the table. The guards run with the privileges of this schema's owner, and
-- touch only the row and the tables of this schema.

-- Returns the resource name of a table: the one that it has, or the one that it would get.
CREATE OR REPLACE FUNCTION resource_of(target regclass) RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT SET quote_all_identifiers = off
AS $$
#variable_conflict use_column
DECLARE
    named text;
    other regclass;
BEGIN
    SELECT p.resource INTO named FROM protections AS p WHERE p.target = resource_of.target;
    IF FOUND THEN
        RETURN named;
    END IF;
    SELECT format('%I.%I', n.nspname, c.relname) INTO named
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = resource_of.target;
    SELECT p.target INTO other FROM protections AS p JOIN pg_class AS c ON c.oid = p.target WHERE p.resource = named;
    IF FOUND THEN
        RAISE EXCEPTION 'The name % is still that of the fence of table %, which was renamed. Unprotect it first.',
            named, other USING ERRCODE = 'duplicate_object';
    END IF;
    RETURN named;
END
$$;

-- Returns the resource name of a table, and lets no other transaction protect or unprotect the
-- table until this one ends. Waits for transactions that have claimed or taken the fence of the
-- table or of a row, which would not know of the change. New claims of them wait for this
-- transaction. Other resources are not concerned.
CREATE OR REPLACE FUNCTION reserve_resource(target regclass) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    named CONSTANT text := resource_of(target);
BEGIN
    IF named IS NULL THEN
        RAISE EXCEPTION 'There is no table %.', coalesce(target::text, 'without a name')
            USING ERRCODE = 'undefined_object';
    END IF;
    LOOP
        PERFORM FROM fences AS f WHERE f.resource = named FOR UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO fences (resource, token, stored_at) VALUES (named, 0, clock_timestamp()) ON CONFLICT DO NOTHING;
    END LOOP;
    -- A transaction with an older snapshot does not see the change. It conflicts with this version
    -- of the fence in hold_protection(), and fails.
    UPDATE fences AS f SET stored_at = f.stored_at WHERE f.resource = named;
    IF resource_of(target) <> named THEN
        RAISE EXCEPTION '% was renamed while this session waited for its fence. Try again.', target
            USING ERRCODE = 'object_in_use';
    END IF;
    RETURN named;
END
$$;

-- Returns whether a fence has added the columns fence_token and fence_at to this table.
CREATE OR REPLACE FUNCTION owns_fence_columns(target regclass) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT coalesce(bool_or(p.own_columns), false) FROM protections AS p WHERE p.target = owns_fence_columns.target
$$;

-- Returns whether a table has the columns fence_token and fence_at with the right types. NULL means
-- that it has neither. With another type, reading a column could run code of the table's owner with
-- the privileges of the reader.
CREATE OR REPLACE FUNCTION has_fence_columns(target regclass) RETURNS boolean
LANGUAGE sql STABLE
AS $$
    SELECT CASE WHEN count(*) > 0 THEN
        count(*) = 2 AND bool_and(
            a.attgenerated = '' AND a.attidentity = '' AND CASE a.attname
                WHEN 'fence_token' THEN a.atttypid = 'int8'::regtype AND a.attnotnull AND a.atthasdef
                ELSE a.atttypid = 'timestamptz'::regtype
            END
        )
    END
    FROM pg_attribute AS a
    WHERE a.attrelid = target AND a.attname IN ('fence_token', 'fence_at') AND NOT a.attisdropped
$$;

-- Locks a table by its OID, because the table may be renamed while this session waits for its name.
CREATE OR REPLACE FUNCTION lock_table(target regclass, mode text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    IF (mode IN ('ACCESS SHARE', 'ACCESS EXCLUSIVE')) IS NOT TRUE THEN
        RAISE EXCEPTION 'The lock mode is ACCESS SHARE or ACCESS EXCLUSIVE, not %.',
            quote_nullable(left(mode, 100))
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = target) THEN
        RAISE EXCEPTION 'There is no table %.', coalesce(target::text, 'without a name')
            USING ERRCODE = 'undefined_object';
    END IF;
    EXECUTE format('LOCK TABLE %s IN %s MODE', target, mode);
    IF NOT EXISTS (
        SELECT FROM pg_locks AS l
        WHERE l.locktype = 'relation' AND l.relation = target AND l.pid = pg_backend_pid() AND l.granted
          AND l.mode = replace(initcap(lock_table.mode), ' ', '') || 'Lock'
          AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
    ) THEN
        RAISE EXCEPTION '% was renamed while this session waited for its lock. Try again.', target
            USING ERRCODE = 'object_in_use';
    END IF;
END
$$;

-- Returns the highest token of a table's rows, 0 for none. Raises an error if row-level security
-- hides rows.
--
-- Only the table's owner may call it, or any role if a superuser owns the table. Reading a table
-- can run code that its owner defined, in an index for example, with the privileges of the reader.
CREATE OR REPLACE FUNCTION highest_token(target regclass) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off
AS $$
DECLARE
    highest bigint;
    its_owner name;
BEGIN
    PERFORM lock_table(target, 'ACCESS SHARE');
    SELECT r.rolname INTO its_owner
    FROM pg_class AS c JOIN pg_roles AS r ON r.oid = c.relowner
    WHERE c.oid = target AND r.rolname <> current_user AND NOT r.rolsuper;
    IF FOUND THEN
        RAISE EXCEPTION 'Table % belongs to role %, and only that role may read its highest token.', target, its_owner
            USING ERRCODE = 'insufficient_privilege',
            HINT = 'Reading the table could run code of that role. Connect as that role.';
    ELSIF has_fence_columns(target) IS NOT TRUE
        OR NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = target AND c.relkind IN ('r', 'p'))
    THEN
        RAISE EXCEPTION 'Table % is protected per row, but its columns fence_token and fence_at have changed.',
            target USING ERRCODE = 'wrong_object_type', HINT = 'Its owner can restore these columns, or protect the table again.';
    END IF;
    EXECUTE format('SELECT max(fence_token) FROM %s', target) INTO highest;
    RETURN coalesce(highest, 0);
END
$$;

-- Records how a table is protected, as its triggers say. Only the table's owner can have created
-- them.
CREATE OR REPLACE FUNCTION record_protection(target regclass) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    named CONSTANT text := reserve_resource(record_protection.target);
    arguments text[];
    per text;
    key_columns text[];
BEGIN
    SELECT (
            -- Each argument ends with a zero byte, and is in the database's encoding.
            SELECT array_agg(convert_from(decode(piece, 'hex'), getdatabaseencoding()) ORDER BY position)
            FROM unnest(string_to_array(regexp_replace(encode(t.tgargs, 'hex'), '(..)', E'\\1 ', 'g'), '00 '))
                 WITH ORDINALITY AS pieces (piece, position)
            WHERE position <= t.tgnargs
        ), CASE WHEN p.proname = 'guard_table_trigger' THEN 'table' ELSE 'row' END
    INTO arguments, per
    FROM pg_trigger AS t JOIN pg_proc AS p ON p.oid = t.tgfoid
    WHERE t.tgrelid = record_protection.target AND t.tgname = 'zz_fenced_store'
      AND p.pronamespace = quote_ident(current_schema())::regnamespace
      AND (p.proname = 'guard_table_trigger' OR starts_with(p.proname, 'guard_'));
    IF NOT FOUND OR arguments[1] <> named
        OR per = 'row' AND NOT EXISTS (
            SELECT FROM pg_trigger AS t JOIN pg_proc AS p ON p.oid = t.tgfoid
            WHERE t.tgrelid = record_protection.target AND t.tgname = 'zz_fenced_store'
              AND p.proname = guard_function_name(record_protection.target, named, arguments[5:])
        )
    THEN
        RAISE EXCEPTION '% has no fence that could be recorded.', record_protection.target
            USING ERRCODE = 'undefined_object';
    END IF;
    key_columns := CASE WHEN per = 'row' THEN arguments[5:] END;
    IF per = 'table' THEN
        PERFORM drop_gates(named);
    END IF;
    -- The record of a table that was dropped.
    DELETE FROM protections AS p
    WHERE p.resource = named AND p.target <> record_protection.target
       OR p.resource <> named AND p.target = record_protection.target;
    INSERT INTO protections AS p (resource, target, per, strict, warn_only, own_columns, key)
    VALUES (
        named, record_protection.target, per, arguments[2]::boolean, arguments[3]::boolean, arguments[4]::boolean,
        key_columns
    )
    ON CONFLICT (resource) DO UPDATE SET
        per = excluded.per, strict = excluded.strict, warn_only = excluded.warn_only, key = excluded.key,
        own_columns = excluded.own_columns;
    RETURN named;
END
$$;

-- Deletes the record of a table that has no fence any more, and drops its guard function.
CREATE OR REPLACE FUNCTION record_unprotection(target regclass) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    was record;
BEGIN
    IF EXISTS (
        SELECT FROM pg_trigger AS t WHERE t.tgrelid = record_unprotection.target AND t.tgname = 'zz_fenced_store'
    ) THEN
        RAISE EXCEPTION '% still has its fence.', record_unprotection.target USING ERRCODE = 'object_in_use';
    END IF;
    DELETE FROM protections AS p WHERE p.target = record_unprotection.target RETURNING p.resource, p.key INTO was;
    IF FOUND AND was.key IS NOT NULL THEN
        PERFORM drop_gates(was.resource);
        EXECUTE format('DROP FUNCTION IF EXISTS %I.%I()',
            current_schema(), guard_function_name(record_unprotection.target, was.resource, was.key));
    END IF;
END
$$;
