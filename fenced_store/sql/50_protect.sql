-- Puts fences on tables. What changes a table runs with the rights of whoever calls it, who must own the table. The triggers
-- run with the rights of the owner of this schema, and touch nothing but the row and our own tables.

-- Writes the values of a key as one piece of text, no two keys the same one.
CREATE OR REPLACE FUNCTION row_key(VARIADIC key text[]) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    -- A backslash before anything but a backslash or a comma comes of no key.
    SELECT CASE WHEN octet_length(convert_to(k, 'UTF8')) <= 512 THEN k ELSE '\#' || encode(sha256(convert_to(k, 'UTF8')), 'hex') END
    FROM (
        SELECT string_agg(replace(replace(v, '\', '\\'), ',', '\,'), ',' ORDER BY place) AS k
        FROM unnest(key) WITH ORDINALITY AS u (v, place)
    ) AS joined
$$;

-- Returns how to write a column of a key as text, with places for the row and the column, so that equal values give equal text
-- and no setting of the session has a say. NULL for a type of which that cannot be said.
--
-- Each begins with concat(), which asks the type's own output function: a cast may be one that a user has made, and would be
-- run with the rights of whoever the trigger runs for.
CREATE OR REPLACE FUNCTION key_expression(column_type oid, column_collation oid) RETURNS text
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT
AS $$
DECLARE
    base record;
BEGIN
    SELECT t.oid, t.typtype, t.typbasetype INTO base FROM pg_type AS t WHERE t.oid = column_type;
    IF base.typtype = 'd' THEN
        RETURN key_expression(base.typbasetype, column_collation);
    ELSIF EXISTS (SELECT FROM pg_collation AS c WHERE c.oid = column_collation AND NOT c.collisdeterministic) THEN
        RETURN NULL;
    END IF;
    RETURN CASE
        WHEN base.typtype = 'e' OR column_type IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'oid'::regtype,
            'bool'::regtype, 'uuid'::regtype, 'text'::regtype, 'varchar'::regtype, 'name'::regtype, 'time'::regtype,
            'inet'::regtype, 'cidr'::regtype, 'macaddr'::regtype) THEN 'concat(%s.%I)'
        WHEN column_type = 'bpchar'::regtype THEN 'rtrim(concat(%s.%I), '' '')'
        WHEN column_type = 'numeric'::regtype THEN 'trim_scale(concat(%s.%I)::numeric)::text'
        WHEN column_type = 'bytea'::regtype THEN 'encode(concat(%s.%I)::bytea, ''hex'')'
        WHEN column_type = 'date'::regtype THEN 'to_jsonb(concat(%s.%I)::date) #>> ''{}'''
        WHEN column_type = 'timestamp'::regtype THEN 'to_jsonb(concat(%s.%I)::timestamp) #>> ''{}'''
        WHEN column_type = 'timestamptz'::regtype
            THEN 'to_jsonb(concat(%s.%I)::timestamptz AT TIME ZONE ''UTC'') #>> ''{}'''
    END;
END
$$;

-- Lists the protected tables, those that the caller cannot touch among them.
CREATE OR REPLACE FUNCTION protected_tables(
    OUT resource text, OUT target regclass, OUT per text, OUT strict boolean, OUT warn_only boolean, OUT key text[],
    OUT enabled boolean
) RETURNS SETOF record
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT p.resource, p.target, p.per, p.strict, p.warn_only, p.key, t.tgenabled IN ('O', 'A')
    FROM protections AS p
    JOIN pg_trigger AS t ON t.tgrelid = p.target AND t.tgname = 'zz_fenced_store'
    ORDER BY p.resource
$$;

-- Returns the name of a table's resource: the one that it has, or will have.
CREATE OR REPLACE FUNCTION resource_of(target regclass) RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT
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
        RAISE EXCEPTION 'The name % is still that of the fence of table %, which was renamed. Unprotect that one first.',
            named, other USING ERRCODE = 'duplicate_object';
    END IF;
    RETURN named;
END
$$;

-- Tells whether values of a type are short and need no escaping, so that a key of one of them is its own text.
CREATE OR REPLACE FUNCTION is_plain_type(column_type oid) RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$
    SELECT column_type IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'oid'::regtype, 'uuid'::regtype, 'bool'::regtype)
$$;

-- Names the function that guards the rows of a table by a key. Of one name there is only ever one body.
CREATE OR REPLACE FUNCTION guard_function_name(target regclass, resource text, key text[]) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT
AS $$
    SELECT 'guard_' || left(md5(concat_ws(' ', resource, key::text, (
        SELECT string_agg(key_expression(a.atttypid, a.attcollation) || is_plain_type(a.atttypid), ' ' ORDER BY u.place)
        FROM unnest(key) WITH ORDINALITY AS u (name, place)
        JOIN pg_attribute AS a ON a.attrelid = target AND a.attname = u.name AND a.attnum > 0 AND NOT a.attisdropped
    ))), 24)
$$;

-- Makes the function that guards the rows of a table with this key, and lets the table's owner make a trigger of it. On any
-- other table it does no harm: whatever the rows are made of, no code of their owner's is run.
CREATE OR REPLACE FUNCTION create_guard(target regclass, key text[]) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
DECLARE
    resource CONSTANT text := resource_of(target);
    its_name CONSTANT text := format('%I.%I', current_schema(), guard_function_name(target, resource, key));
    settings text := 'SET search_path FROM CURRENT';
    plain boolean := cardinality(key) = 1;
    new_parts text[] := '{}';
    old_parts text[] := '{}';
    one record;
    body text;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = target AND c.relkind IN ('r', 'p')) THEN
        RAISE EXCEPTION '% is no table, so there is nothing to guard.', coalesce(target::text, 'Nothing')
            USING ERRCODE = 'wrong_object_type';
    END IF;
    FOR one IN
        SELECT u.name, key_expression(a.atttypid, a.attcollation) AS pattern, is_plain_type(a.atttypid) AS plain
        FROM unnest(key) WITH ORDINALITY AS u (name, place)
        JOIN pg_attribute AS a ON a.attrelid = target AND a.attname = u.name AND a.attnum > 0 AND NOT a.attisdropped
        ORDER BY u.place
    LOOP
        IF one.pattern LIKE '%timestamptz%' THEN
            -- Other styles print zones by names that do not tell them apart.
            settings := settings || ' SET DateStyle = ''ISO, YMD''';
        END IF;
        new_parts := new_parts || format(one.pattern, 'NEW', one.name);
        old_parts := old_parts || format(one.pattern, 'OLD', one.name);
        plain := plain AND one.plain;
    END LOOP;
    IF (cardinality(key) = cardinality(new_parts) AND array_position(new_parts, NULL) IS NULL) IS NOT TRUE THEN
        RAISE EXCEPTION 'Not all of % are columns of % that can tell its rows apart.',
            coalesce(quote_literal(left(key::text, 200)), 'no columns'), target
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    body := format($body$
DECLARE
    is_strict CONSTANT boolean := TG_ARGV[1];
    warn_only CONSTANT boolean := TG_ARGV[2];
    token bigint;
    was text;
    is_now text;
BEGIN
    -- With columns of other types, which their owner may make of them, what is done below could run code of his.
    IF TG_OP = 'DELETE' THEN
        IF pg_typeof(OLD.fence_token)::oid <> 20 OR pg_typeof(OLD.fence_at)::oid <> 1184 THEN
            RAISE EXCEPTION 'Table %% is protected, and its columns fence_token and fence_at are not what they were.', TG_RELID::regclass
                USING ERRCODE = 'wrong_object_type';
        END IF;
    ELSIF pg_typeof(NEW.fence_token)::oid <> 20 OR pg_typeof(NEW.fence_at)::oid <> 1184 THEN
        RAISE EXCEPTION 'Table %% is protected, and its columns fence_token and fence_at are not what they were.', TG_RELID::regclass
            USING ERRCODE = 'wrong_object_type';
    END IF;
    IF TG_WHEN = 'AFTER' THEN
        -- It may have waited for a row with this key to be deleted, and that one's fence was left behind meanwhile.
        IF NEW.fence_token > 0 AND NOT warn_only THEN
            PERFORM guard_row(%1$L, %1$L || ':' || %2$s, 0, NULL, is_strict, warn_only);
        END IF;
        RETURN NULL;
    END IF;
    IF TG_OP = 'INSERT' THEN
        is_now := %1$L || ':' || %2$s;
        token := guard_row(%1$L, is_now, 0, NULL, is_strict, warn_only);
        NEW.fence_token := coalesce(token, current_fence(is_now));
        NEW.fence_at := CASE WHEN token IS NOT NULL THEN clock_timestamp() END;
        RETURN NEW;
    END IF;
    was := %1$L || ':' || %3$s;
    token := guard_row(%1$L, was, OLD.fence_token, OLD.fence_at, is_strict, warn_only);
    IF TG_OP = 'DELETE' THEN
        PERFORM preserve_fence(was, greatest(token, OLD.fence_token));
        RETURN OLD;
    END IF;
    is_now := %1$L || ':' || %2$s;
    IF is_now <> was THEN
        PERFORM preserve_fence(was, greatest(token, OLD.fence_token));
        token := coalesce(guard_row(%1$L, is_now, 0, NULL, is_strict, warn_only), token);
        -- Should it move to another partition, it will be inserted there as a row without a history.
        PERFORM preserve_fence(is_now, greatest(token, OLD.fence_token));
    END IF;
    -- Whatever the statement itself says about these two.
    NEW.fence_token := greatest(token, OLD.fence_token);
    NEW.fence_at := CASE WHEN token IS NULL THEN OLD.fence_at ELSE clock_timestamp() END;
    RETURN NEW;
END
$body$, resource,
        CASE WHEN plain THEN new_parts[1] ELSE format('row_key(%s)', array_to_string(new_parts, ', ')) END,
        CASE WHEN plain THEN old_parts[1] ELSE format('row_key(%s)', array_to_string(old_parts, ', ')) END);
    EXECUTE format(
        'CREATE OR REPLACE FUNCTION %s() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER %s AS %L',
        its_name, settings, body
    );
    FOR one IN
        SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS grantee
        FROM pg_proc AS p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
        WHERE p.oid = to_regprocedure(its_name || '()') AND a.grantee <> p.proowner
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s() FROM %s', its_name, one.grantee);
    END LOOP;
    EXECUTE format('GRANT EXECUTE ON FUNCTION %s() TO %s', its_name, (SELECT c.relowner::regrole FROM pg_class AS c WHERE c.oid = target));
    EXECUTE format('COMMENT ON FUNCTION %s() IS %L', its_name, 'The fence of ' || resource);
    -- Against this one all transactions of a stricter isolation look, and none should wait for another that makes it.
    INSERT INTO fences AS f (resource, token, stored_at) VALUES (resource, 0, clock_timestamp()) ON CONFLICT DO NOTHING;
    RETURN its_name;
END
$$;

-- Notes what the triggers of a table say, once they are there: only its owner can have made them.
CREATE OR REPLACE FUNCTION record_protection(target regclass) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    named CONSTANT text := resource_of(record_protection.target);
    said text[];
    per text;
    its_key text[];
BEGIN
    -- Claims that are under way are waited for, for they know nothing of this; those that come wait for us.
    LOCK TABLE protections IN EXCLUSIVE MODE;
    SELECT (
            -- Each argument ends with a zero byte; what is not ASCII is in the database's own encoding.
            SELECT array_agg(convert_from(decode(piece, 'hex'), getdatabaseencoding()) ORDER BY place)
            FROM unnest(string_to_array(regexp_replace(encode(t.tgargs, 'hex'), '(..)', '\1 ', 'g'), '00 '))
                 WITH ORDINALITY AS pieces (piece, place)
            WHERE place <= t.tgnargs
        ), CASE WHEN p.proname = 'guard_table_trigger' THEN 'table' ELSE 'row' END
    INTO said, per
    FROM pg_trigger AS t JOIN pg_proc AS p ON p.oid = t.tgfoid
    WHERE t.tgrelid = record_protection.target AND t.tgname = 'zz_fenced_store'
      AND p.pronamespace = quote_ident(current_schema())::regnamespace
      AND (p.proname = 'guard_table_trigger' OR starts_with(p.proname, 'guard_'));
    IF NOT FOUND OR said[1] <> named
        OR per = 'row' AND NOT EXISTS (
            SELECT FROM pg_trigger AS t JOIN pg_proc AS p ON p.oid = t.tgfoid
            WHERE t.tgrelid = record_protection.target AND t.tgname = 'zz_fenced_store'
              AND p.proname = guard_function_name(record_protection.target, named, said[5:])
        )
    THEN
        RAISE EXCEPTION '% has no fence that could be noted.', record_protection.target USING ERRCODE = 'undefined_object';
    END IF;
    its_key := CASE WHEN per = 'row' THEN said[5:] END;
    -- That of a table which was dropped.
    DELETE FROM protections AS p
    WHERE p.resource = named AND p.target <> record_protection.target
       OR p.resource <> named AND p.target = record_protection.target;
    INSERT INTO protections AS p (resource, target, per, strict, warn_only, own_columns, key)
    VALUES (named, record_protection.target, per, said[2]::boolean, said[3]::boolean, said[4]::boolean, its_key)
    ON CONFLICT (resource) DO UPDATE SET
        per = excluded.per, strict = excluded.strict, warn_only = excluded.warn_only, key = excluded.key,
        own_columns = excluded.own_columns;
    RETURN named;
END
$$;

-- Forgets a table that has no fence any more, and drops what guarded it.
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
    LOCK TABLE protections IN EXCLUSIVE MODE;
    DELETE FROM protections AS p WHERE p.target = record_unprotection.target RETURNING p.resource, p.key INTO was;
    IF FOUND AND was.key IS NOT NULL THEN
        EXECUTE format('DROP FUNCTION IF EXISTS %I.%I()',
            current_schema(), guard_function_name(record_unprotection.target, was.resource, was.key));
    END IF;
END
$$;

-- Tells whether a fence has added the columns of this table that only a fence needs.
CREATE OR REPLACE FUNCTION owns_fence_columns(target regclass) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT coalesce(bool_or(p.own_columns), false) FROM protections AS p WHERE p.target = owns_fence_columns.target
$$;

-- Tells whether the columns of a fence are on a table, and are what they should be; NULL where neither is there. With another
-- type, reading one could run code of the table's owner with the rights of whoever reads.
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

-- Takes the lock of a table by its number: it may be renamed while its name is waited for.
CREATE OR REPLACE FUNCTION lock_table(target regclass, mode text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    IF (mode IN ('ACCESS SHARE', 'ACCESS EXCLUSIVE')) IS NOT TRUE THEN
        RAISE EXCEPTION 'A table is locked for ACCESS SHARE or ACCESS EXCLUSIVE, not for %.',
            quote_nullable(left(mode, 100))
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = target) THEN
        RAISE EXCEPTION 'There is no table %.', coalesce(target::text, 'of no name') USING ERRCODE = 'undefined_object';
    END IF;
    EXECUTE format('LOCK TABLE %s IN %s MODE', target, mode);
    IF NOT EXISTS (
        SELECT FROM pg_locks AS l
        WHERE l.locktype = 'relation' AND l.relation = target AND l.pid = pg_backend_pid() AND l.granted
          AND l.mode = replace(initcap(lock_table.mode), ' ', '') || 'Lock'
          AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
    ) THEN
        RAISE EXCEPTION '% was renamed meanwhile. Try again.', target USING ERRCODE = 'object_in_use';
    END IF;
END
$$;

-- Returns the highest token of a table's rows, 0 for none; an error where not all rows can be seen.
--
-- Only for its owner, or for a table of a superuser's: to look at a table can run code that its owner has put into an
-- index, say, with the rights of whoever looks.
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
        RAISE EXCEPTION 'Table % belongs to role %, and only that role may look for its highest token.', target, its_owner
            USING ERRCODE = 'insufficient_privilege', HINT = 'To look could run code of that role''s. Connect as that role.';
    ELSIF has_fence_columns(target) IS NOT TRUE
        OR NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = target AND c.relkind IN ('r', 'p'))
    THEN
        RAISE EXCEPTION 'Table % is protected row by row, and its columns fence_token and fence_at are not what they were.',
            target USING ERRCODE = 'wrong_object_type', HINT = 'Its owner can protect it anew, or put them back.';
    END IF;
    EXECUTE format('SELECT max(fence_token) FROM %s', target) INTO highest;
    RETURN coalesce(highest, 0);
END
$$;

-- The trigger before TRUNCATE of a table that is protected row by row. Runs as whoever empties the table, who must own it.
CREATE OR REPLACE FUNCTION guard_truncate_trigger() RETURNS trigger
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM guard_truncate(TG_ARGV[0], highest_token(TG_RELID), TG_ARGV[1]::boolean, TG_ARGV[2]::boolean);
    RETURN NULL;
END
$$;

-- Protects a table, row by row or as a whole, and returns the name of its resource. Protecting it again changes how.
CREATE OR REPLACE FUNCTION protect_table(
    target regclass,
    key text[] DEFAULT NULL,
    per text DEFAULT 'row',
    strict boolean DEFAULT false,
    warn_only boolean DEFAULT false
) RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    ours CONSTANT text := quote_ident(current_schema());
    it record;
    resource text;
    qualified text;
    guard_function text;
    columns text[] := key;
    one record;
    arguments text;
    kind text;
    leaf regclass;
    adds boolean := false;
BEGIN
    SELECT c.relkind, c.relispartition, n.nspname INTO it
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = target;
    IF per NOT IN ('row', 'table') OR per IS NULL THEN
        RAISE EXCEPTION 'A table is protected per row or per table, not per %.', quote_nullable(per)
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF it.relkind NOT IN ('r', 'p') THEN
        RAISE EXCEPTION '% is no table, so it cannot be protected.', target USING ERRCODE = 'wrong_object_type';
    ELSIF it.relispartition THEN
        RAISE EXCEPTION '% is a partition. Protect the table that it is a part of.', target
            USING ERRCODE = 'wrong_object_type';
    ELSIF it.nspname = current_schema() OR it.nspname IN ('pg_catalog', 'information_schema') THEN
        RAISE EXCEPTION '% is not a table of yours.', target USING ERRCODE = 'wrong_object_type';
    END IF;
    PERFORM lock_table(target, 'ACCESS EXCLUSIVE');
    resource := resource_of(target);
    SELECT c.oid, c.relname, c.relkind, n.nspname INTO it
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = target;
    qualified := format('%I.%I', it.nspname, it.relname);
    IF EXISTS (
        SELECT FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
        WHERE target IN (i.inhparent, i.inhrelid) AND NOT c.relispartition
    ) THEN
        RAISE EXCEPTION '% inherits, or is inherited from; what is written through the one would pass the fence of the other.',
            qualified USING ERRCODE = 'wrong_object_type';
    END IF;
    IF per = 'row' THEN
        IF columns IS NULL THEN
            SELECT array_agg(a.attname::text ORDER BY array_position(i.indkey::int2[], a.attnum)) INTO columns
            FROM pg_index AS i
            JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
            WHERE i.indrelid = target AND i.indisprimary;
        END IF;
        IF columns IS NULL OR columns = '{}' THEN
            RAISE EXCEPTION '% has no primary key. Say which columns tell its rows apart, or protect it per table.',
                qualified USING ERRCODE = 'invalid_parameter_value';
        END IF;
        FOR one IN SELECT u.name, a.attnum, a.atttypid, a.attcollation, a.attnotnull, a.attgenerated
            FROM unnest(columns) AS u (name)
            LEFT JOIN pg_attribute AS a
                ON a.attrelid = target AND a.attname = u.name AND a.attnum > 0 AND NOT a.attisdropped
        LOOP
            IF one.attnum IS NULL OR one.name IN ('fence_token', 'fence_at') THEN
                RAISE EXCEPTION '% has no column % to tell its rows apart by.', qualified, quote_nullable(one.name)
                    USING ERRCODE = 'undefined_column';
            ELSIF key_expression(one.atttypid, one.attcollation) IS NULL OR one.attgenerated <> '' OR NOT one.attnotnull THEN
                RAISE EXCEPTION 'Column % of % cannot tell rows apart for a fence: %.', quote_literal(one.name), qualified,
                    CASE
                        WHEN one.attgenerated <> '' THEN 'it is generated, and known too late'
                        WHEN NOT one.attnotnull THEN 'it may be NULL'
                        ELSE format('equal values of type %s may not look the same', format_type(one.atttypid, NULL))
                    END USING ERRCODE = 'invalid_parameter_value', HINT = 'Name other columns, or protect the table as a whole.';
            END IF;
        END LOOP;
        IF NOT EXISTS (
            SELECT FROM pg_index AS i
            WHERE i.indrelid = target AND i.indisunique AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL
              AND i.indexprs IS NULL
              AND columns @> ARRAY(
                  SELECT a.attname::text FROM pg_attribute AS a
                  WHERE a.attrelid = target AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
              )
        ) THEN
            RAISE EXCEPTION 'No unique index of % sees to it that % tell its rows apart.', qualified,
                array_to_string(columns, ', ')
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Make one that is not deferrable, or protect it per table.';
        END IF;
    ELSIF columns IS NOT NULL THEN
        RAISE EXCEPTION 'A key is for a table that is protected per row.' USING ERRCODE = 'invalid_parameter_value';
    END IF;

    adds := per = 'row' AND owns_fence_columns(target);
    -- What it had before goes, but for the tokens: they pass to the table's own fence if the rows' are to go.
    PERFORM unprotect_table(
        target, per <> 'row', false,
        (SELECT p.key IS DISTINCT FROM columns FROM protected_tables() AS p WHERE p.target = protect_table.target)
    );
    IF EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgrelid = target AND t.tgname = 'zz_fenced_store') THEN
        RAISE EXCEPTION '% is protected already, by a fenced_store in another schema.', qualified
            USING ERRCODE = 'duplicate_object';
    END IF;
    IF per = 'row' THEN
        IF NOT has_fence_columns(target) THEN
            RAISE EXCEPTION '% already has a column fence_token or fence_at of another kind, which is not ours.', qualified
                USING ERRCODE = 'duplicate_column',
                HINT = 'A table may bring both: fence_token bigint NOT NULL DEFAULT 0, fence_at timestamptz.';
        ELSIF has_fence_columns(target) IS NULL THEN
            -- Rewrites nothing.
            adds := true;
            EXECUTE format(
                'ALTER TABLE %s ADD COLUMN fence_token bigint NOT NULL DEFAULT 0, ADD COLUMN fence_at timestamptz', qualified
            );
        END IF;
        guard_function := create_guard(target, columns);
        kind := 'ROW';
    ELSE
        guard_function := ours || '.guard_table_trigger';
        -- A statement's trigger on a partitioned table does not see what is written to its partitions directly.
        kind := CASE it.relkind WHEN 'p' THEN 'ROW' ELSE 'STATEMENT' END;
    END IF;

    arguments := concat_ws(', ',
        quote_literal(resource), quote_literal(strict), quote_literal(warn_only), quote_literal(adds),
        (SELECT string_agg(quote_literal(c), ', ' ORDER BY place) FROM unnest(columns) WITH ORDINALITY AS u (c, place)));
    -- The last of its kind by its name, so that it sees what the others have made of a row.
    EXECUTE format('CREATE TRIGGER zz_fenced_store BEFORE INSERT OR UPDATE OR DELETE ON %s FOR EACH %s EXECUTE FUNCTION %s(%s)',
        qualified, kind, guard_function, arguments);
    IF per = 'row' THEN
        EXECUTE format('CREATE TRIGGER zz_fenced_store_inserted AFTER INSERT ON %s FOR EACH ROW EXECUTE FUNCTION %s(%s)',
            qualified, guard_function, arguments);
        EXECUTE format(
            'CREATE TRIGGER zz_fenced_store_renamed AFTER UPDATE ON %s FOR EACH ROW WHEN (%s) EXECUTE FUNCTION %s(%s)',
            qualified, (SELECT string_agg(format('OLD.%1$I IS DISTINCT FROM NEW.%1$I', c), ' OR ') FROM unnest(columns) AS c),
            guard_function, arguments);
    END IF;
    FOR leaf IN SELECT t.relid FROM pg_partition_tree(target) AS t UNION SELECT target LOOP
        EXECUTE format('CREATE TRIGGER zz_fenced_store_truncate BEFORE TRUNCATE ON %s FOR EACH STATEMENT EXECUTE FUNCTION %s(%s)',
            leaf, CASE per WHEN 'row' THEN ours || '.guard_truncate_trigger' ELSE guard_function END, arguments);
    END LOOP;
    RETURN record_protection(target);
END
$$;

-- Takes the fence off a table; false where there was none. The highest token of its rows stays with the table's own fence,
-- so that a fence put on later does not begin below it.
CREATE OR REPLACE FUNCTION unprotect_table(
    target regclass, drop_columns boolean DEFAULT true, must_exist boolean DEFAULT true, keep_highest boolean DEFAULT true
) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    was record;
    leaf regclass;
    highest bigint;
BEGIN
    SELECT * INTO was FROM protected_tables() AS p WHERE p.target = unprotect_table.target;
    IF NOT FOUND THEN
        IF must_exist THEN
            RAISE EXCEPTION '% is not protected.', target USING ERRCODE = 'undefined_object';
        END IF;
        RETURN false;
    END IF;
    PERFORM lock_table(target, 'ACCESS EXCLUSIVE');
    IF was.per = 'row' AND (drop_columns OR keep_highest) THEN
        highest := greatest(highest_token(target), highest_fence(was.resource));
    ELSE
        highest := highest_fence(was.resource);
    END IF;
    IF drop_columns OR keep_highest THEN
        PERFORM preserve_fence(was.resource, highest);
        -- It may have been renamed, and would be protected under its new name then.
        PERFORM preserve_fence(
            (SELECT format('%I.%I', n.nspname, c.relname)
             FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = target), highest
        );
    END IF;
    EXECUTE format('DROP TRIGGER IF EXISTS zz_fenced_store ON %s', target);
    EXECUTE format('DROP TRIGGER IF EXISTS zz_fenced_store_inserted ON %s', target);
    EXECUTE format('DROP TRIGGER IF EXISTS zz_fenced_store_renamed ON %s', target);
    FOR leaf IN
        SELECT t.relid FROM pg_partition_tree(target) AS t
        UNION SELECT target
        -- And what was a part of it once, if it is ours still.
        UNION SELECT t.tgrelid::regclass FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
        WHERE t.tgname = 'zz_fenced_store_truncate' AND pg_has_role(c.relowner, 'USAGE')
          AND position(convert_to(was.resource, getdatabaseencoding()) || '\x00'::bytea IN t.tgargs) = 1
    LOOP
        EXECUTE format('DROP TRIGGER IF EXISTS zz_fenced_store_truncate ON %s', leaf);
    END LOOP;
    IF was.per = 'row' AND drop_columns AND owns_fence_columns(target) THEN
        EXECUTE format('ALTER TABLE %s DROP COLUMN fence_token, DROP COLUMN fence_at', target);
    END IF;
    IF must_exist THEN
        PERFORM record_unprotection(target);
    END IF;
    RETURN true;
END
$$;
