-- Returns the name of the function that guards the rows of a table with this key. The name
-- determines the body.
CREATE OR REPLACE FUNCTION guard_function_name(target regclass, resource text, key text[]) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT
AS $$
    SELECT 'guard_' || left(md5(concat_ws(' ', resource, key::text, (
        SELECT string_agg(
            key_expression(a.atttypid, a.attcollation) || is_plain_type(a.atttypid), ' ' ORDER BY u.position
        )
        FROM unnest(key) WITH ORDINALITY AS u (name, position)
        JOIN pg_attribute AS a ON a.attrelid = target AND a.attname = u.name AND a.attnum > 0 AND NOT a.attisdropped
    ))), 24)
$$;

-- Creates the function that guards the rows of a table with this key, and lets the table's owner
-- use it in a trigger. On any other table the function does no harm: whatever the types of the
-- columns, it runs no code of the table's owner.
CREATE OR REPLACE FUNCTION create_guard(target regclass, key text[]) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
DECLARE
    resource text;
    function_name text;
    settings text := 'SET search_path FROM CURRENT';
    plain boolean := cardinality(key) = 1;
    new_parts text[] := '{}';
    old_parts text[] := '{}';
    one record;
    body text;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = target AND c.relkind IN ('r', 'p')) THEN
        RAISE EXCEPTION '% is not a table, so it cannot be guarded.', coalesce(target::text, 'NULL')
            USING ERRCODE = 'wrong_object_type';
    END IF;
    resource := reserve_resource(target);
    function_name := format('%I.%I', current_schema(), guard_function_name(target, resource, key));
    FOR one IN
        SELECT u.name, key_expression(a.atttypid, a.attcollation) AS pattern, is_plain_type(a.atttypid) AS plain
        FROM unnest(key) WITH ORDINALITY AS u (name, position)
        JOIN pg_attribute AS a ON a.attrelid = target AND a.attname = u.name AND a.attnum > 0 AND NOT a.attisdropped
        ORDER BY u.position
    LOOP
        IF one.pattern LIKE '%timestamptz%' THEN
            -- Other styles print time zones by names that are ambiguous.
            settings := settings || ' SET DateStyle = ''ISO, YMD''';
        END IF;
        new_parts := new_parts || format(one.pattern, 'NEW', one.name);
        old_parts := old_parts || format(one.pattern, 'OLD', one.name);
        plain := plain AND one.plain;
    END LOOP;
    IF (cardinality(key) = cardinality(new_parts) AND array_position(new_parts, NULL) IS NULL) IS NOT TRUE THEN
        RAISE EXCEPTION 'Not all of % are columns of % that can identify its rows.',
            coalesce(quote_literal(left(key::text, 200)), 'no columns'), target
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    body := format($body$
DECLARE
    is_strict CONSTANT boolean := TG_ARGV[1];
    warn_only CONSTANT boolean := TG_ARGV[2];
    token bigint;
    -- Of the statement's snapshot, because this function is STABLE. The functions that it calls are
    -- volatile and read the latest versions.
    oldest CONSTANT xid := pg_snapshot_xmin(pg_current_snapshot())::xid;
    carries CONSTANT boolean := coalesce(current_setting('fenced_store.token', true), '') <> '';
    ready boolean;
    was text;
    is_now text;
BEGIN
    -- The owner may change the types of these columns. The code below could then run code of the
    -- owner.
    IF TG_OP = 'DELETE' THEN
        IF pg_typeof(OLD.fence_token)::oid <> 20 OR pg_typeof(OLD.fence_at)::oid <> 1184 THEN
            RAISE EXCEPTION 'Table %% is protected, but its columns fence_token and fence_at have changed.',
                TG_RELID::regclass USING ERRCODE = 'wrong_object_type';
        END IF;
    ELSIF pg_typeof(NEW.fence_token)::oid <> 20 OR pg_typeof(NEW.fence_at)::oid <> 1184 THEN
        RAISE EXCEPTION 'Table %% is protected, but its columns fence_token and fence_at have changed.',
            TG_RELID::regclass USING ERRCODE = 'wrong_object_type';
    END IF;
    IF TG_WHEN = 'AFTER' THEN
        -- The INSERT may have waited until a row with this key was deleted. That row's fence was
        -- kept in the meantime, and is seen here.
        IF NEW.fence_token > 0 AND NOT warn_only THEN
            token := guard_row(%1$L, %1$L || ':' || %2$s, 0, NULL, is_strict, warn_only, oldest);
%5$s
        END IF;
        RETURN NULL;
    END IF;
    IF TG_OP = 'INSERT' THEN
        is_now := %1$L || ':' || %2$s;
        -- From here on a claim of the row or its table waits for this transaction, or has committed
        -- and is seen in guard_row().
        ready := carries AND %4$s(hashtext(is_now) & 31);
        token := guard_row(%1$L, is_now, 0, NULL, is_strict, warn_only, oldest);
%5$s
        NEW.fence_token := coalesce(token, current_fence(is_now));
        NEW.fence_at := CASE WHEN token IS NOT NULL THEN clock_timestamp() END;
        RETURN NEW;
    END IF;
    was := %1$L || ':' || %3$s;
    ready := carries AND %4$s(hashtext(was) & 31);
    token := guard_row(%1$L, was, OLD.fence_token, OLD.fence_at, is_strict, warn_only, oldest);
%5$s
    IF TG_OP = 'DELETE' THEN
        PERFORM preserve_fence(was, greatest(token, OLD.fence_token));
        RETURN OLD;
    END IF;
    is_now := %1$L || ':' || %2$s;
    IF is_now <> was THEN
        PERFORM preserve_fence(was, greatest(token, OLD.fence_token));
        ready := carries AND %4$s(hashtext(is_now) & 31);
        token := coalesce(guard_row(%1$L, is_now, 0, NULL, is_strict, warn_only, oldest), token);
%5$s
        -- If the row moves to another partition, it is inserted there as a new row.
        PERFORM preserve_fence(is_now, greatest(token, OLD.fence_token));
    END IF;
    -- Whatever values the statement gives for these two columns.
    NEW.fence_token := greatest(token, OLD.fence_token);
    NEW.fence_at := CASE WHEN token IS NULL THEN OLD.fence_at ELSE clock_timestamp() END;
    RETURN NEW;
END
$body$, resource,
        CASE WHEN plain THEN new_parts[1] ELSE format('row_key(%s)', array_to_string(new_parts, ', ')) END,
        CASE WHEN plain THEN old_parts[1] ELSE format('row_key(%s)', array_to_string(old_parts, ', ')) END,
        'pass_' || gate_of(resource, resource),
        format(
            'IF token < 0 THEN'
            ' PERFORM check_snapshot(%1$L, (SELECT f.xmin FROM fences AS f WHERE f.resource = %1$L));'
            ' token := -token;'
            ' END IF;',
            resource
        ));
    EXECUTE format(
        'CREATE OR REPLACE FUNCTION %s() RETURNS trigger LANGUAGE plpgsql STABLE SECURITY DEFINER %s AS %L',
        function_name, settings, body
    );
    FOR one IN
        SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS grantee
        FROM pg_proc AS p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
        WHERE p.oid = to_regprocedure(function_name || '()') AND a.grantee <> p.proowner
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s() FROM %s', function_name, one.grantee);
    END LOOP;
    EXECUTE format('GRANT EXECUTE ON FUNCTION %s() TO %s', function_name, (
        SELECT c.relowner::regrole FROM pg_class AS c WHERE c.oid = target
    ));
    EXECUTE format('COMMENT ON FUNCTION %s() IS %L', function_name, 'The fence of ' || resource);
    PERFORM create_gates(resource);
    RETURN function_name;
END
$$;
