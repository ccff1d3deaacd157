-- Refuses DDL in a schema from now on, unless it runs in a migration with one of these names that
-- holds its lock. Replaces the names that the schema had. For the owner only, and the first guard
-- of a database needs a role that may create event triggers: a superuser.
CREATE OR REPLACE FUNCTION guard_schema(schema_name text, names text[] DEFAULT '{migrate}') RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    here CONSTANT name := current_schema();
    prefix CONSTANT text := CASE WHEN octet_length(here) <= 40 THEN here::text ELSE 'dblock_' || md5(here) END;
    event record;
BEGIN
    IF guard_schema.schema_name IN (here, 'information_schema') OR guard_schema.schema_name LIKE 'pg\_%' THEN
        RAISE EXCEPTION 'Schema % cannot be guarded: it belongs to dblock or to Postgres.',
            quote_literal(guard_schema.schema_name)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT EXISTS (SELECT FROM pg_namespace AS n WHERE n.nspname = guard_schema.schema_name) THEN
        RAISE EXCEPTION 'There is no schema % in this database to guard.', quote_nullable(guard_schema.schema_name)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF coalesce(cardinality(names), 0) = 0 THEN
        RAISE EXCEPTION 'The guard of schema % needs the name of a migration.', quote_literal(guard_schema.schema_name)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM check_request(n, '1 s') FROM unnest(names) AS n;
    -- One change at a time. DDL in other sessions reads the table and does not wait.
    LOCK TABLE ddl_guards IN SHARE ROW EXCLUSIVE MODE;
    DELETE FROM ddl_guards AS g WHERE g.schema_name = guard_schema.schema_name;
    INSERT INTO ddl_guards (schema_name, name) SELECT DISTINCT guard_schema.schema_name, n FROM unnest(names) AS n;
    FOR event IN
        SELECT w.event, w.suffix, e.evtname, e.evtenabled
        FROM (VALUES ('ddl_command_start', 'start'), ('ddl_command_end', 'end'), ('sql_drop', 'drop'))
            AS w (event, suffix)
        LEFT JOIN pg_event_trigger AS e ON e.evtevent = w.event AND e.evtfoid = 'guard_ddl()'::regprocedure
    LOOP
        IF event.evtname IS NULL THEN
            EXECUTE format(
                'CREATE EVENT TRIGGER %I ON %s EXECUTE FUNCTION guard_ddl()',
                format('%s_guard_%s', prefix, event.suffix), event.event
            );
        ELSIF event.evtenabled NOT IN ('O', 'A') THEN
            EXECUTE format('ALTER EVENT TRIGGER %I ENABLE', event.evtname);
        END IF;
    END LOOP;
END
$$;
