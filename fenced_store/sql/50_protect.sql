-- Puts fences on tables. What changes a table runs with the rights of whoever calls it, who must own the table.

-- Writes the values of a key as one piece of text, no two keys the same one.
CREATE OR REPLACE FUNCTION row_key(VARIADIC key text[]) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    -- A backslash before anything but a backslash, a comma or an N comes of no key.
    SELECT CASE WHEN octet_length(k) <= 512 THEN k ELSE '\#' || encode(sha256(convert_to(k, 'UTF8')), 'hex') END
    FROM (
        SELECT string_agg(coalesce(replace(replace(v, '\', '\\'), ',', '\,'), '\N'), ',' ORDER BY place) AS k
        FROM unnest(key) WITH ORDINALITY AS u (v, place)
    ) AS joined
$$;

-- Lists the protected tables, those that the caller cannot touch among them.
CREATE OR REPLACE FUNCTION protected_tables(
    OUT resource text, OUT target regclass, OUT per text, OUT strict boolean, OUT warn_only boolean, OUT key text[]
) RETURNS SETOF record
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT p.resource, p.target, p.per, p.strict, p.warn_only, p.key
    FROM protections AS p
    WHERE EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgrelid = p.target AND t.tgname = 'zz_fenced_store')
    ORDER BY p.resource
$$;

-- Notes that a table is protected, and how; returns the name of its resource, which is the table's at the first time. Only for
-- those who own the table.
CREATE OR REPLACE FUNCTION note_protection(
    target regclass, per text, strict boolean, warn_only boolean, key text[]
) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    named text;
    other regclass;
BEGIN
    PERFORM check_owner(note_protection.target);
    SELECT p.resource INTO named FROM protections AS p WHERE p.target = note_protection.target;
    IF NOT FOUND THEN
        SELECT format('%I.%I', n.nspname, c.relname) INTO named
        FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = note_protection.target;
        SELECT p.target INTO other
        FROM protections AS p JOIN pg_class AS c ON c.oid = p.target
        WHERE p.resource = named;
        IF FOUND THEN
            RAISE EXCEPTION 'The name % is still that of the fence of table %, which was renamed. Unprotect that one first.',
                named, other USING ERRCODE = 'duplicate_object';
        END IF;
        -- That of a table which was dropped.
        DELETE FROM protections AS p WHERE p.resource = named;
    END IF;
    INSERT INTO protections AS p (resource, target, per, strict, warn_only, key)
    VALUES (
        named, note_protection.target, note_protection.per, note_protection.strict, note_protection.warn_only,
        note_protection.key
    )
    ON CONFLICT (resource) DO UPDATE
    SET per = excluded.per, strict = excluded.strict, warn_only = excluded.warn_only, key = excluded.key;
    RETURN named;
END
$$;

-- Forgets that a table is protected.
CREATE OR REPLACE FUNCTION note_unprotection(target regclass) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
BEGIN
    PERFORM check_owner(note_unprotection.target);
    DELETE FROM protections AS p WHERE p.target = note_unprotection.target;
END
$$;

CREATE OR REPLACE FUNCTION check_owner(target regclass) RETURNS void
LANGUAGE plpgsql STABLE
AS $$
BEGIN
    IF NOT EXISTS (
        SELECT FROM pg_class AS c WHERE c.oid = target AND pg_has_role(session_user, c.relowner, 'MEMBER')
    ) THEN
        RAISE EXCEPTION 'must be owner of table %', target USING ERRCODE = 'insufficient_privilege';
    END IF;
END
$$;

-- Returns how to write a column of a key as text, with places for the row and the column, so that equal values give equal text
-- and no setting of the session has a say. NULL for a type of which that cannot be said.
CREATE OR REPLACE FUNCTION as_text(kind oid, sorting oid) RETURNS text
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    base record;
BEGIN
    SELECT t.oid, t.typtype, t.typbasetype INTO base FROM pg_type AS t WHERE t.oid = kind;
    IF base.typtype = 'd' THEN
        RETURN as_text(base.typbasetype, sorting);
    ELSIF EXISTS (SELECT FROM pg_collation AS c WHERE c.oid = sorting AND NOT c.collisdeterministic) THEN
        RETURN NULL;
    ELSIF base.typtype = 'e' THEN
        -- By its own output, and not by a cast, which its owner may have made.
        RETURN 'concat(%s.%I)';
    END IF;
    RETURN CASE
        WHEN kind IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'oid'::regtype, 'bool'::regtype, 'uuid'::regtype,
            'text'::regtype, 'varchar'::regtype, 'bpchar'::regtype, 'name'::regtype) THEN '(%s.%I)::text'
        WHEN kind = 'numeric'::regtype THEN 'trim_scale(%s.%I)::text'
        WHEN kind = 'bytea'::regtype THEN 'encode(%s.%I, ''hex'')'
        WHEN kind IN ('date'::regtype, 'timestamp'::regtype) THEN 'to_jsonb(%s.%I) #>> ''{}'''
        WHEN kind = 'timestamptz'::regtype THEN 'to_jsonb(%s.%I AT TIME ZONE ''UTC'') #>> ''{}'''
    END;
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
    guard_name text;
    columns text[] := key;
    pattern text;
    new_parts text[] := '{}';
    old_parts text[] := '{}';
    one record;
    body text;
    arguments text;
    kind text;
    leaf regclass;
BEGIN
    SELECT c.oid, c.relname, c.relkind, c.relispartition, c.relowner, n.nspname INTO it
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = target;
    qualified := format('%I.%I', it.nspname, it.relname);
    IF per NOT IN ('row', 'table') OR per IS NULL THEN
        RAISE EXCEPTION 'A table is protected per row or per table, not per %.', quote_nullable(per)
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF it.relkind NOT IN ('r', 'p') THEN
        RAISE EXCEPTION '% is no table, so it cannot be protected.', qualified USING ERRCODE = 'wrong_object_type';
    ELSIF it.relispartition THEN
        RAISE EXCEPTION '% is a partition. Protect the table that it is a part of.', qualified
            USING ERRCODE = 'wrong_object_type';
    ELSIF EXISTS (
        SELECT FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
        WHERE target IN (i.inhparent, i.inhrelid) AND NOT c.relispartition
    ) THEN
        RAISE EXCEPTION '% inherits, or is inherited from; what is written through the one would pass the fence of the other.',
            qualified USING ERRCODE = 'wrong_object_type';
    ELSIF it.nspname = current_schema() OR it.nspname IN ('pg_catalog', 'information_schema') THEN
        RAISE EXCEPTION '% is not a table of yours.', qualified USING ERRCODE = 'wrong_object_type';
    ELSIF NOT has_schema_privilege(it.relowner, current_schema(), 'USAGE')
        OR NOT has_function_privilege(it.relowner, ours || '.leave_fence(text, bigint)', 'EXECUTE')
    THEN
        -- The trigger runs with the owner's rights, whoever puts it there.
        RAISE EXCEPTION 'permission denied: the owner of %, role %, has not been granted fenced_store', qualified,
            it.relowner::regrole USING ERRCODE = 'insufficient_privilege';
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
    ELSIF columns IS NOT NULL THEN
        RAISE EXCEPTION 'A key is for a table that is protected per row.' USING ERRCODE = 'invalid_parameter_value';
    END IF;

    -- What it had before goes, but for the tokens: they pass to the table's own fence if the rows' are to go.
    PERFORM unprotect_table(target, per <> 'row', false);

    IF per = 'row' THEN
        FOR one IN SELECT u.name, u.place, a.attnum, a.atttypid, a.attcollation, a.attnotnull, a.attgenerated
            FROM unnest(columns) WITH ORDINALITY AS u (name, place)
            LEFT JOIN pg_attribute AS a
                ON a.attrelid = target AND a.attname = u.name AND a.attnum > 0 AND NOT a.attisdropped
            ORDER BY u.place
        LOOP
            IF one.attnum IS NULL OR one.name IN ('fence_token', 'fence_at') THEN
                RAISE EXCEPTION '% has no column % to tell its rows apart by.', qualified, quote_nullable(one.name)
                    USING ERRCODE = 'undefined_column';
            END IF;
            pattern := as_text(one.atttypid, one.attcollation);
            IF pattern IS NULL OR one.attgenerated <> '' OR NOT one.attnotnull THEN
                RAISE EXCEPTION 'Column % of % cannot tell rows apart for a fence: %.', quote_literal(one.name), qualified,
                    CASE
                        WHEN one.attgenerated <> '' THEN 'it is generated, and known too late'
                        WHEN NOT one.attnotnull THEN 'it may be NULL'
                        ELSE format('values of type %s can be equal and look different', format_type(one.atttypid, NULL))
                    END USING ERRCODE = 'invalid_parameter_value', HINT = 'Name other columns, or protect the table as a whole.';
            END IF;
            new_parts := new_parts || format(pattern, 'NEW', one.name);
            old_parts := old_parts || format(pattern, 'OLD', one.name);
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
        IF EXISTS (
            SELECT FROM pg_attribute AS a
            WHERE a.attrelid = target AND a.attname IN ('fence_token', 'fence_at') AND NOT a.attisdropped
              AND a.atttypid <> CASE a.attname WHEN 'fence_token' THEN 'int8'::regtype ELSE 'timestamptz'::regtype END
        ) THEN
            RAISE EXCEPTION '% already has a column fence_token or fence_at of another type, which is not ours.', qualified
                USING ERRCODE = 'duplicate_column';
        END IF;
        -- Neither rewrites the table.
        EXECUTE format(
            'ALTER TABLE %s ADD COLUMN IF NOT EXISTS fence_token bigint NOT NULL DEFAULT 0,'
            ' ADD COLUMN IF NOT EXISTS fence_at timestamptz', qualified
        );
    END IF;
    resource := note_protection(target, per, strict, warn_only, columns);

    IF per = 'row' THEN
        guard_name := format('%I.%I', it.nspname, 'fenced_store_' || left(md5(resource), 16));
        body := format($body$
DECLARE
    token bigint;
    was text;
    is_now text;
    highest bigint;
BEGIN
    IF TG_OP = 'TRUNCATE' THEN
        EXECUTE format('SELECT max(t.fence_token) FROM %%s AS t', TG_RELID::regclass) INTO highest;
        PERFORM %2$s.guard_truncate(%1$L, coalesce(highest, 0), %3$L, %4$L);
        RETURN NULL;
    END IF;
    IF TG_WHEN = 'AFTER' THEN
        -- It may have waited for a row with this key to be deleted, and that one's fence was left behind meanwhile.
        IF NEW.fence_token > 0 AND NOT %4$L THEN
            PERFORM %2$s.guard(%1$L, %1$L || ':' || %5$s, 0, NULL, %3$L, %4$L);
        END IF;
        RETURN NULL;
    END IF;
    IF TG_OP = 'INSERT' THEN
        is_now := %1$L || ':' || %5$s;
        token := %2$s.guard(%1$L, is_now, 0, NULL, %3$L, %4$L);
        NEW.fence_token := coalesce(token, %2$s.standing_fence(is_now));
        NEW.fence_at := CASE WHEN token IS NOT NULL THEN clock_timestamp() END;
        RETURN NEW;
    END IF;
    was := %1$L || ':' || %6$s;
    token := %2$s.guard(%1$L, was, OLD.fence_token, OLD.fence_at, %3$L, %4$L);
    IF TG_OP = 'DELETE' THEN
        PERFORM %2$s.leave_fence(was, greatest(token, OLD.fence_token));
        RETURN OLD;
    END IF;
    is_now := %1$L || ':' || %5$s;
    IF is_now <> was THEN
        PERFORM %2$s.leave_fence(was, greatest(token, OLD.fence_token));
        token := coalesce(%2$s.guard(%1$L, is_now, 0, NULL, %3$L, %4$L), token);
    END IF;
    -- Whatever the statement itself says about these two.
    NEW.fence_token := greatest(token, OLD.fence_token);
    NEW.fence_at := CASE WHEN token IS NULL THEN OLD.fence_at ELSE clock_timestamp() END;
    RETURN NEW;
END
$body$,
            resource, ours, strict, warn_only,
            format('%s.row_key(%s)', ours, array_to_string(new_parts, ', ')),
            format('%s.row_key(%s)', ours, array_to_string(old_parts, ', '))
        );
        -- A table that was dropped has left its own behind.
        EXECUTE format(
            'CREATE OR REPLACE FUNCTION %s() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER'
            ' SET search_path = pg_catalog, pg_temp AS %L', guard_name, body
        );
        EXECUTE format('REVOKE ALL ON FUNCTION %s() FROM PUBLIC', guard_name);
        EXECUTE format('COMMENT ON FUNCTION %s() IS %L', guard_name, 'fenced_store: the fence of ' || resource);
        -- Never with more rights than the table's owner has, who could have it run what he likes.
        EXECUTE format('ALTER FUNCTION %s() OWNER TO %s', guard_name, it.relowner::regrole);
        kind := 'ROW';
    ELSE
        guard_name := ours || '.guard_table';
        -- A statement's trigger on a partitioned table does not see what is written to its partitions directly.
        kind := CASE it.relkind WHEN 'p' THEN 'ROW' ELSE 'STATEMENT' END;
    END IF;

    arguments := concat_ws(', ', quote_literal(resource), quote_literal(strict), quote_literal(warn_only));
    -- The last of its kind by its name, so that it sees what the others have made of a row.
    EXECUTE format('CREATE TRIGGER zz_fenced_store BEFORE INSERT OR UPDATE OR DELETE ON %s FOR EACH %s EXECUTE FUNCTION %s(%s)',
        qualified, kind, guard_name, arguments);
    IF per = 'row' THEN
        EXECUTE format('CREATE TRIGGER zz_fenced_store_inserted AFTER INSERT ON %s FOR EACH ROW EXECUTE FUNCTION %s()',
            qualified, guard_name);
        EXECUTE format('CREATE TRIGGER zz_fenced_store_renamed AFTER UPDATE ON %s FOR EACH ROW WHEN (%s) EXECUTE FUNCTION %s()',
            qualified, (SELECT string_agg(format('OLD.%1$I IS DISTINCT FROM NEW.%1$I', c), ' OR ') FROM unnest(columns) AS c),
            guard_name);
    END IF;
    FOR leaf IN SELECT t.relid FROM pg_partition_tree(target) AS t UNION SELECT target LOOP
        EXECUTE format('CREATE TRIGGER zz_fenced_store_truncate BEFORE TRUNCATE ON %s FOR EACH STATEMENT EXECUTE FUNCTION %s(%s)',
            leaf, guard_name, arguments);
    END LOOP;
    RETURN resource;
END
$$;

-- Takes the fence off a table; false where there was none. The highest token of its rows stays with the table's own fence,
-- so that a fence put on later does not begin below it.
CREATE OR REPLACE FUNCTION unprotect_table(
    target regclass, drop_columns boolean DEFAULT true, must_exist boolean DEFAULT true
) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    was record;
    leaf regclass;
    guard_of text;
    highest bigint;
BEGIN
    SELECT * INTO was FROM protected_tables() AS p WHERE p.target = unprotect_table.target;
    IF NOT FOUND THEN
        IF must_exist THEN
            RAISE EXCEPTION '% is not protected.', target USING ERRCODE = 'undefined_object';
        END IF;
        RETURN false;
    END IF;
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', target);
    SELECT format('%I.%I', n.nspname, p.proname) INTO guard_of
    FROM pg_trigger AS t JOIN pg_proc AS p ON p.oid = t.tgfoid JOIN pg_namespace AS n ON n.oid = p.pronamespace
    WHERE t.tgrelid = target AND t.tgname = 'zz_fenced_store' AND n.nspname <> current_schema();
    EXECUTE format('DROP TRIGGER IF EXISTS zz_fenced_store ON %s', target);
    EXECUTE format('DROP TRIGGER IF EXISTS zz_fenced_store_inserted ON %s', target);
    EXECUTE format('DROP TRIGGER IF EXISTS zz_fenced_store_renamed ON %s', target);
    FOR leaf IN
        SELECT t.relid FROM pg_partition_tree(target) AS t
        UNION SELECT target
        -- And what was a part of it once.
        UNION SELECT t.tgrelid::regclass FROM pg_trigger AS t
        WHERE t.tgname = 'zz_fenced_store_truncate' AND t.tgfoid = to_regprocedure(guard_of || '()')
    LOOP
        EXECUTE format('DROP TRIGGER IF EXISTS zz_fenced_store_truncate ON %s', leaf);
    END LOOP;
    IF guard_of IS NOT NULL THEN
        EXECUTE format('DROP FUNCTION %s()', guard_of);
    END IF;
    IF was.per = 'row' AND drop_columns THEN
        EXECUTE format('SELECT max(fence_token) FROM %s', target) INTO highest;
        PERFORM leave_fence(was.resource, greatest(highest, highest_of(was.resource)));
        EXECUTE format('ALTER TABLE %s DROP COLUMN fence_token, DROP COLUMN fence_at', target);
    END IF;
    IF must_exist THEN
        PERFORM note_unprotection(target);
    END IF;
    RETURN true;
END
$$;
