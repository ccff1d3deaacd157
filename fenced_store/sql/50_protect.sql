-- Puts fences on tables. These run with the rights of whoever calls them, who must own the table.

-- Writes the values of a key as one piece of text, no two keys the same one.
CREATE OR REPLACE FUNCTION row_key(VARIADIC key text[]) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT CASE WHEN octet_length(k) <= 512 THEN k ELSE 'sha256 ' || encode(sha256(convert_to(k, 'UTF8')), 'hex') END
    FROM (
        SELECT string_agg(coalesce(replace(replace(v, '\', '\\'), ',', '\,'), '\N'), ',' ORDER BY place) AS k
        FROM unnest(key) WITH ORDINALITY AS u (v, place)
    ) AS joined
$$;

-- Lists the protected tables, those that the caller cannot touch among them.
CREATE OR REPLACE FUNCTION protected_tables(
    OUT resource text, OUT target regclass, OUT per text, OUT strict boolean, OUT warn_only boolean, OUT key text[]
) RETURNS SETOF record
LANGUAGE sql STABLE
AS $$
    SELECT a[1], tgrelid::regclass, a[4], a[2]::boolean, a[3]::boolean, nullif(a[5:], '{}')
    FROM (
        SELECT t.tgrelid,
               -- Each argument ends with a zero byte; what is not ASCII is in the database's own encoding.
               (SELECT array_agg(convert_from(decode(piece, 'hex'), getdatabaseencoding()) ORDER BY place)
                FROM unnest(string_to_array(regexp_replace(encode(t.tgargs, 'hex'), '(..)', '\1 ', 'g'), '00 '))
                     WITH ORDINALITY AS pieces (piece, place)
                WHERE place <= t.tgnargs) AS a
        FROM pg_trigger AS t
        WHERE t.tgname = 'zz_fenced_store_truncate' AND t.tgparentid = 0
          AND NOT EXISTS (SELECT FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
                          WHERE i.inhrelid = t.tgrelid AND c.relispartition)
    ) AS found
    ORDER BY 1
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
    as_text text;
    new_parts text[] := '{}';
    old_parts text[] := '{}';
    one record;
    body text;
    arguments text;
    kind text;
    leaf regclass;
BEGIN
    SELECT c.oid, c.relname, c.relkind, c.relispartition, n.nspname, n.oid AS space INTO it
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = target;
    qualified := format('%I.%I', it.nspname, it.relname);
    resource := qualified;
    IF per NOT IN ('row', 'table') OR per IS NULL THEN
        RAISE EXCEPTION 'A table is protected per row or per table, not per %.', quote_nullable(per)
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF it.relkind NOT IN ('r', 'p') THEN
        RAISE EXCEPTION '% is no table, so it cannot be protected.', qualified USING ERRCODE = 'wrong_object_type';
    ELSIF it.relispartition THEN
        RAISE EXCEPTION '% is a partition. Protect the table that it is a part of.', qualified
            USING ERRCODE = 'wrong_object_type';
    ELSIF it.nspname = current_schema() OR it.nspname IN ('pg_catalog', 'information_schema') THEN
        RAISE EXCEPTION '% is not a table of yours.', qualified USING ERRCODE = 'wrong_object_type';
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
        FOR one IN SELECT u.name, u.place, a.attnum, a.atttypid
            FROM unnest(columns) WITH ORDINALITY AS u (name, place)
            LEFT JOIN pg_attribute AS a
                ON a.attrelid = target AND a.attname = u.name AND a.attnum > 0 AND NOT a.attisdropped
            ORDER BY u.place
        LOOP
            IF one.attnum IS NULL OR one.name IN ('fence_token', 'fence_at') THEN
                RAISE EXCEPTION '% has no column % to tell its rows apart by.', qualified, quote_nullable(one.name)
                    USING ERRCODE = 'undefined_column';
            END IF;
            -- As text that no setting of the session has a say in.
            as_text := CASE
                WHEN one.atttypid IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'uuid'::regtype, 'text'::regtype,
                    'varchar'::regtype, 'bpchar'::regtype, 'numeric'::regtype, 'bool'::regtype)
                    THEN '(%s.%I)::text'
                WHEN one.atttypid = 'bytea'::regtype THEN 'encode(%s.%I, ''hex'')'
                WHEN one.atttypid = 'timestamptz'::regtype THEN 'to_jsonb(%s.%I AT TIME ZONE ''UTC'') #>> ''{}'''
                ELSE 'to_jsonb(%s.%I) #>> ''{}'''
            END;
            new_parts := new_parts || format(as_text, 'NEW', one.name);
            old_parts := old_parts || format(as_text, 'OLD', one.name);
        END LOOP;
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
        guard_name := format('%I.%I', it.nspname, 'fenced_store_' || left(md5(resource), 16));
        body := format($body$
DECLARE
    token bigint;
    was text;
    is_now text;
    highest bigint;
BEGIN
    IF TG_OP = 'TRUNCATE' THEN
        SELECT max(t.fence_token) INTO highest FROM %1$s AS t;
        PERFORM %3$s.guard_whole(%2$L, coalesce(highest, 0), %4$s);
        RETURN NULL;
    END IF;
    IF TG_WHEN = 'AFTER' THEN
        -- It may have waited for a row with this key to be deleted, and that one's fence was left behind meanwhile.
        IF NEW.fence_token > 0 THEN
            PERFORM %3$s.guard(%2$L, %2$L || ':' || %5$s, 0, NULL, %4$s);
        END IF;
        RETURN NULL;
    END IF;
    IF TG_OP = 'INSERT' THEN
        token := %3$s.guard(%2$L, %2$L || ':' || %5$s, 0, NULL, %4$s);
        NEW.fence_token := coalesce(token, 0);
        NEW.fence_at := CASE WHEN token IS NOT NULL THEN clock_timestamp() END;
        RETURN NEW;
    END IF;
    was := %2$L || ':' || %6$s;
    token := %3$s.guard(%2$L, was, OLD.fence_token, OLD.fence_at, %4$s);
    IF TG_OP = 'DELETE' THEN
        PERFORM %3$s.leave_fence(was, greatest(token, OLD.fence_token));
        RETURN OLD;
    END IF;
    is_now := %2$L || ':' || %5$s;
    IF is_now <> was THEN
        PERFORM %3$s.leave_fence(was, greatest(token, OLD.fence_token));
        token := coalesce(%3$s.guard(%2$L, is_now, 0, NULL, %4$s), token);
    END IF;
    -- Whatever the statement itself says about these two.
    NEW.fence_token := greatest(token, OLD.fence_token);
    NEW.fence_at := CASE WHEN token IS NULL THEN OLD.fence_at ELSE clock_timestamp() END;
    RETURN NEW;
END
$body$,
            qualified, resource, ours, format('%L::boolean, %L::boolean', strict, warn_only),
            format('%s.row_key(%s)', ours, array_to_string(new_parts, ', ')),
            format('%s.row_key(%s)', ours, array_to_string(old_parts, ', '))
        );
        EXECUTE format(
            -- A table that was dropped has left its own behind.
            'CREATE OR REPLACE FUNCTION %s() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER'
            ' SET search_path = pg_catalog, pg_temp AS %L', guard_name, body
        );
        EXECUTE format('REVOKE ALL ON FUNCTION %s() FROM PUBLIC', guard_name);
        EXECUTE format('COMMENT ON FUNCTION %s() IS %L', guard_name, 'fenced_store: the fence of ' || resource);
        kind := 'ROW';
    ELSE
        guard_name := ours || '.guard_table';
        -- A statement's trigger on a partitioned table does not see what is written to its partitions directly.
        kind := CASE it.relkind WHEN 'p' THEN 'ROW' ELSE 'STATEMENT' END;
    END IF;

    arguments := concat_ws(', ', quote_literal(resource), quote_literal(strict), quote_literal(warn_only), quote_literal(per),
        (SELECT string_agg(quote_literal(c), ', ' ORDER BY place) FROM unnest(columns) WITH ORDINALITY AS u (c, place)));
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
    FOR leaf IN SELECT t.relid FROM pg_partition_tree(target) AS t UNION SELECT target LOOP
        EXECUTE format('DROP TRIGGER IF EXISTS zz_fenced_store_truncate ON %s', leaf);
    END LOOP;
    IF guard_of IS NOT NULL THEN
        EXECUTE format('DROP FUNCTION %s()', guard_of);
    END IF;
    IF was.per = 'row' AND drop_columns THEN
        EXECUTE format('SELECT max(fence_token) FROM %s', target) INTO highest;
        PERFORM leave_fence(was.resource, highest);
        EXECUTE format('ALTER TABLE %s DROP COLUMN fence_token, DROP COLUMN fence_at', target);
    END IF;
    RETURN true;
END
$$;
