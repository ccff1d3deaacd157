-- Protects a table, per row or as a whole, and returns the name of its resource. A second call
-- changes how the table is protected.
CREATE OR REPLACE FUNCTION protect_table(
    target regclass,
    key text[] DEFAULT NULL,
    per text DEFAULT 'row',
    strict boolean DEFAULT false,
    warn_only boolean DEFAULT false
) RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET quote_all_identifiers = off
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
    ELSIF strict IS NULL OR warn_only IS NULL THEN
        RAISE EXCEPTION 'The arguments strict and warn_only for table % are true or false, not NULL.', target
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF it.relkind NOT IN ('r', 'p') THEN
        RAISE EXCEPTION '% is not a table, so it cannot be protected.', target USING ERRCODE = 'wrong_object_type';
    ELSIF it.relispartition THEN
        RAISE EXCEPTION '% is a partition. Protect its partitioned table instead.', target
            USING ERRCODE = 'wrong_object_type';
    ELSIF it.nspname = current_schema() OR it.nspname IN ('pg_catalog', 'information_schema') THEN
        RAISE EXCEPTION '% belongs to Postgres or to fenced_store, so it cannot be protected.', target
            USING ERRCODE = 'wrong_object_type';
    END IF;
    -- First the fence, then the table: in the order of a transaction that writes inside the fence.
    resource := reserve_resource(target);
    PERFORM lock_table(target, 'ACCESS EXCLUSIVE');
    IF resource_of(target) <> resource THEN
        RAISE EXCEPTION '% was renamed while this session waited for its lock. Try again.', target
            USING ERRCODE = 'object_in_use';
    END IF;
    SELECT c.oid, c.relname, c.relkind, n.nspname INTO it
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = target;
    qualified := format('%I.%I', it.nspname, it.relname);
    IF EXISTS (
        SELECT FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
        WHERE target IN (i.inhparent, i.inhrelid) AND NOT c.relispartition
    ) THEN
        RAISE EXCEPTION '% inherits or is inherited from. A write through one would bypass the fence of the other.',
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
            RAISE EXCEPTION '% has no primary key. Name the columns that identify its rows, or protect it per table.',
                qualified USING ERRCODE = 'invalid_parameter_value';
        END IF;
        FOR one IN SELECT u.name, a.attnum, a.atttypid, a.attcollation, a.attnotnull, a.attgenerated
            FROM unnest(columns) AS u (name)
            LEFT JOIN pg_attribute AS a
                ON a.attrelid = target AND a.attname = u.name AND a.attnum > 0 AND NOT a.attisdropped
        LOOP
            IF one.attnum IS NULL OR one.name IN ('fence_token', 'fence_at') THEN
                RAISE EXCEPTION '% has no column % that could identify its rows.', qualified, quote_nullable(one.name)
                    USING ERRCODE = 'undefined_column';
            ELSIF key_expression(one.atttypid, one.attcollation) IS NULL OR one.attgenerated <> '' OR NOT one.attnotnull
            THEN
                RAISE EXCEPTION 'Column % of % cannot identify rows for a fence: %.',
                    quote_literal(one.name), qualified,
                    CASE
                        WHEN one.attgenerated <> '' THEN 'it is generated, and so known too late'
                        WHEN NOT one.attnotnull THEN 'it may be NULL'
                        ELSE format('equal values of type %s may not look the same', format_type(one.atttypid, NULL))
                    END
                    USING ERRCODE = 'invalid_parameter_value',
                    HINT = 'Name other columns, or protect the table as a whole.';
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
            RAISE EXCEPTION 'No unique index of % guarantees that % identify its rows.', qualified,
                array_to_string(columns, ', ')
                USING ERRCODE = 'invalid_parameter_value',
                HINT = 'Create one that is not deferrable, or protect the table as a whole.';
        END IF;
    ELSIF columns IS NOT NULL THEN
        RAISE EXCEPTION 'Only a table that is protected per row takes a key.' USING ERRCODE = 'invalid_parameter_value';
    END IF;

    adds := per = 'row' AND owns_fence_columns(target);
    -- Remove the old protection. The tokens stay: if the rows' columns are dropped, the table's
    -- fence keeps them.
    PERFORM unprotect_table(
        target, per <> 'row', false,
        (SELECT p.key IS DISTINCT FROM columns FROM protected_tables() AS p WHERE p.target = protect_table.target)
    );
    IF EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgrelid = target AND t.tgname = 'zz_fenced_store') THEN
        RAISE EXCEPTION '% is already protected, by a fenced_store in another schema.', qualified
            USING ERRCODE = 'duplicate_object';
    END IF;
    IF per = 'row' THEN
        IF NOT has_fence_columns(target) THEN
            RAISE EXCEPTION '% already has a column fence_token or fence_at of another type.', qualified
                USING ERRCODE = 'duplicate_column',
                HINT = 'A table may define both itself: fence_token bigint NOT NULL DEFAULT 0, fence_at timestamptz.';
        ELSIF has_fence_columns(target) IS NULL THEN
            -- This does not rewrite the table.
            adds := true;
            EXECUTE format(
                'ALTER TABLE %s ADD COLUMN fence_token bigint NOT NULL DEFAULT 0, ADD COLUMN fence_at timestamptz',
                qualified
            );
        END IF;
        guard_function := create_guard(target, columns);
        kind := 'ROW';
    ELSE
        guard_function := ours || '.guard_table_trigger';
        -- A statement trigger of a partitioned table does not fire for writes to its partitions.
        kind := CASE it.relkind WHEN 'p' THEN 'ROW' ELSE 'STATEMENT' END;
    END IF;

    arguments := concat_ws(', ',
        quote_literal(resource), quote_literal(strict), quote_literal(warn_only), quote_literal(adds),
        (SELECT string_agg(quote_literal(c), ', ' ORDER BY u.position)
         FROM unnest(columns) WITH ORDINALITY AS u (c, position)));
    -- The name sorts last, so that this trigger sees the row as other triggers have changed it.
    EXECUTE format(
        'CREATE TRIGGER zz_fenced_store BEFORE INSERT OR UPDATE OR DELETE ON %s FOR EACH %s EXECUTE FUNCTION %s(%s)',
        qualified, kind, guard_function, arguments);
    IF per = 'row' THEN
        EXECUTE format(
            'CREATE TRIGGER zz_fenced_store_inserted AFTER INSERT ON %s FOR EACH ROW EXECUTE FUNCTION %s(%s)',
            qualified, guard_function, arguments);
        EXECUTE format(
            'CREATE TRIGGER zz_fenced_store_renamed AFTER UPDATE ON %s FOR EACH ROW WHEN (%s) EXECUTE FUNCTION %s(%s)',
            qualified,
            (SELECT string_agg(format('OLD.%1$I IS DISTINCT FROM NEW.%1$I', c), ' OR ') FROM unnest(columns) AS c),
            guard_function, arguments);
    END IF;
    FOR leaf IN SELECT t.relid FROM pg_partition_tree(target) AS t UNION SELECT target LOOP
        EXECUTE format(
            'CREATE TRIGGER zz_fenced_store_truncate BEFORE TRUNCATE ON %s FOR EACH STATEMENT EXECUTE FUNCTION %s(%s)',
            leaf, CASE per WHEN 'row' THEN ours || '.guard_truncate_trigger' ELSE guard_function END, arguments);
    END LOOP;
    RETURN record_protection(target);
END
$$;
