-- The guard of DDL: event triggers that refuse DDL in the schemas of ddl_guards, unless it runs in
-- a session of a migration that holds the lock. guard_schema() and unguard_schema() turn it on and
-- off. It prevents accidents: a session can set the application_name of a migration by hand.

-- Returns whether this session belongs to a migration with one of these names (NULL for any name)
-- that holds its lock. The session's role is the one that has begun the run, or one that the role
-- of the run may act as. With `pins`, no other client is granted the lock before this transaction
-- ends.
CREATE OR REPLACE FUNCTION runs_migration(names text[], pins boolean) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    held record;
BEGIN
    SELECT l.name, l.token, l.expires_at INTO held
    FROM distributed_locks AS l
    JOIN migration_runs AS r ON r.name = l.name AND r.token = l.token
    JOIN pg_roles AS o ON o.rolname = r.session_role
    WHERE (names IS NULL OR l.name = ANY (names)) AND pg_has_role(o.oid, session_user, 'USAGE')
      AND migration_mark(l.name, l.token) = current_setting('application_name')
    LIMIT 1;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF NOT sees_latest_commits() THEN
        -- This snapshot does not show renewals, and the row may have changed since. The migrator
        -- has proven the lease at the start of its transaction.
        RETURN true;
    END IF;
    IF pins THEN
        RETURN assert_held(held.name, held.token);
    END IF;
    RETURN held.expires_at > clock_timestamp();
END
$$;

-- Returns a word of a statement as the name that it means: in lower case unless it is quoted.
CREATE OR REPLACE FUNCTION identifier_of(word text) RETURNS text
LANGUAGE sql IMMUTABLE
AS $$
    SELECT CASE
        WHEN word LIKE '"%' THEN replace(substr(word, 2, length(word) - 2), '""', '"')
        ELSE lower(word)
    END
$$;

-- Returns whether the objects of a command are known too late, at its end: CONCURRENTLY commits
-- before it, and an object that was moved or a schema that was renamed is elsewhere by then. The
-- text may be that of a function or a block that runs the command. CONCURRENTLY cannot run in one.
CREATE OR REPLACE FUNCTION hides_its_objects(tag text, statement text) RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$
    SELECT CASE
        WHEN tag = 'ALTER SCHEMA' THEN true
        WHEN tag LIKE 'ALTER %' AND statement ~* '\mset\s+schema\M' THEN true
        WHEN tag IN ('CREATE INDEX', 'DROP INDEX', 'ALTER TABLE') AND statement ~* '\mconcurrently\M' THEN
            regexp_replace(statement, '/\*([^*]|\*+[^*/])*\*+/|--[^\n]*', ' ', 'g')
                ~* '^\s*(create|drop|alter)\M.*\mconcurrently\M'
        ELSE false
    END
$$;

-- Returns the guarded schemas that a statement seems to change, found by the names in its text, and
-- the word that was found. A word that is qualified with another schema does not count.
CREATE OR REPLACE FUNCTION guarded_names(statement text) RETURNS TABLE (schema_name text, object text)
LANGUAGE sql STABLE
AS $$
    SELECT DISTINCT ON (g.schema_name) g.schema_name, w.word
    FROM (
        SELECT identifier_of(m.parts[1]), identifier_of(m.parts[2])
        FROM (VALUES ($re$("(?:[^"]|"")+"|[^][\s"'(),;.:=<>+*/%&|!?-]+)$re$)) AS p (word),
             regexp_matches(guarded_names.statement, format('(?:%s\s*\.\s*)?%s', p.word, p.word), 'g') AS m (parts)
    ) AS w (qualifier, word)
    JOIN (SELECT DISTINCT o.schema_name FROM ddl_guards AS o) AS g
        ON g.schema_name = coalesce(w.qualifier, g.schema_name)
    LEFT JOIN pg_namespace AS n ON n.nspname = g.schema_name
    WHERE w.word = g.schema_name
       OR EXISTS (SELECT FROM pg_class AS c WHERE c.relnamespace = n.oid AND c.relname = w.word)
       OR EXISTS (SELECT FROM pg_proc AS p WHERE p.pronamespace = n.oid AND p.proname = w.word)
       OR EXISTS (SELECT FROM pg_type AS t WHERE t.typnamespace = n.oid AND t.typname = w.word)
    ORDER BY g.schema_name, w.word
$$;

-- Returns the guarded schemas that the command of an event trigger changes, and an object in each
-- of them.
CREATE OR REPLACE FUNCTION guarded_changes(event text) RETURNS TABLE (schema_name text, object text)
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
BEGIN
    IF event = 'ddl_command_start' THEN
        RETURN QUERY SELECT f.schema_name, f.object FROM guarded_names(current_query()) AS f;
    ELSIF event = 'sql_drop' THEN
        RETURN QUERY
            SELECT g.schema_name, min(d.object_identity)
            FROM pg_event_trigger_dropped_objects() AS d
            JOIN (SELECT DISTINCT o.schema_name FROM ddl_guards AS o) AS g
                ON g.schema_name = CASE d.object_type WHEN 'schema' THEN d.object_name ELSE d.schema_name END
            WHERE NOT d.is_temporary
            GROUP BY g.schema_name;
    ELSE
        RETURN QUERY
            SELECT g.schema_name, min(d.object_identity)
            FROM pg_event_trigger_ddl_commands() AS d
            JOIN (SELECT DISTINCT o.schema_name FROM ddl_guards AS o) AS g
                ON g.schema_name = coalesce(d.schema_name, (
                    SELECT n.nspname FROM pg_namespace AS n
                    WHERE n.oid = CASE d.classid
                        WHEN 'pg_namespace'::regclass THEN d.objid
                        -- Objects of a table, which have no schema of their own.
                        WHEN 'pg_trigger'::regclass THEN (
                            SELECT c.relnamespace FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
                            WHERE t.oid = d.objid
                        )
                        WHEN 'pg_policy'::regclass THEN (
                            SELECT c.relnamespace FROM pg_policy AS p JOIN pg_class AS c ON c.oid = p.polrelid
                            WHERE p.oid = d.objid
                        )
                        WHEN 'pg_rewrite'::regclass THEN (
                            SELECT c.relnamespace FROM pg_rewrite AS r JOIN pg_class AS c ON c.oid = r.ev_class
                            WHERE r.oid = d.objid
                        )
                    END
                ))
            GROUP BY g.schema_name;
    END IF;
END
$$;

-- Refuses DDL in a guarded schema outside a migration that holds the lock. Runs at the start of
-- each command, at its end, and after it has dropped objects.
--
-- A guard that is broken, for example because a table of dblock is missing, refuses nothing and
-- warns: otherwise no DDL could run in this database, not even for temporary tables.
CREATE OR REPLACE FUNCTION guard_ddl() RETURNS event_trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
DECLARE
    is_start CONSTANT boolean := tg_event = 'ddl_command_start';
    application CONSTANT text := current_setting('application_name');
    reason CONSTANT text := nullif(current_setting('dblock.allow_ddl', true), '');
    touched record;
    needed text[];
    allowed boolean := true;
BEGIN
    -- These change no definition.
    IF tg_tag IN ('REFRESH MATERIALIZED VIEW', 'REINDEX') THEN
        RETURN;
    END IF;
    IF is_start AND NOT hides_its_objects(tg_tag, current_query()) THEN
        RETURN;
    END IF;
    BEGIN
        FOR touched IN SELECT f.schema_name, f.object FROM guarded_changes(tg_event) AS f LOOP
            needed := array_agg(g.name ORDER BY g.name) FROM ddl_guards AS g WHERE g.schema_name = touched.schema_name;
            -- At the start, a name in the text may also mean an object of another schema, which
            -- another migration changes.
            allowed := reason IS NOT NULL OR runs_migration(CASE WHEN NOT is_start THEN needed END, NOT is_start);
            EXIT WHEN NOT allowed;
            IF reason IS NOT NULL THEN
                RAISE LOG 'dblock: % of % in schema % is allowed by dblock.allow_ddl: %',
                    tg_tag, touched.object, quote_ident(touched.schema_name), reason;
            END IF;
        END LOOP;
    EXCEPTION WHEN syntax_error_or_access_rule_violation THEN
        RAISE WARNING 'The guard of dblock cannot check % and lets it pass: %', tg_tag, sqlerrm
            USING HINT = 'Run dblock doctor. To remove the guard: dblock guard remove, or DROP EVENT TRIGGER.';
        RETURN;
    END;
    IF NOT allowed THEN
        RAISE EXCEPTION '% of % is refused: DDL in schema % needs a migration that holds the lock %. This session %.',
            tg_tag, touched.object, quote_ident(touched.schema_name),
            (SELECT string_agg(quote_literal(n), ' or ') FROM unnest(needed) AS n),
            CASE WHEN application LIKE 'dblock-migrate:%'
                THEN format('belongs to %s, which does not hold it', application)
                ELSE 'belongs to no migration'
            END
            USING ERRCODE = 'DBL02',
                HINT = format(
                    'Run it in a migration, for example: dblock migrate --name %s -- COMMAND. In an emergency: '
                    'SET dblock.allow_ddl = ''the reason''; and try again. To remove the guard: dblock guard remove %s',
                    quote_literal(needed[1]), quote_ident(touched.schema_name)
                );
    END IF;
END
$$;
