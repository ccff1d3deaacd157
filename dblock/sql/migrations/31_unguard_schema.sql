-- Allows DDL in a schema again, or with NULL in all of them. For the owner only.
--
-- With the last guard the event triggers are dropped. Returns the names of those that this role may
-- not drop: they stay, and refuse nothing.
CREATE OR REPLACE FUNCTION unguard_schema(schema_name text DEFAULT NULL) RETURNS text[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    kept text[] := '{}';
    event record;
BEGIN
    LOCK TABLE ddl_guards IN SHARE ROW EXCLUSIVE MODE;
    DELETE FROM ddl_guards AS g
    WHERE unguard_schema.schema_name IS NULL OR g.schema_name = unguard_schema.schema_name;
    IF EXISTS (SELECT FROM ddl_guards) THEN
        RETURN kept;
    END IF;
    FOR event IN
        SELECT e.evtname FROM pg_event_trigger AS e
        WHERE e.evtfoid = 'guard_ddl()'::regprocedure ORDER BY e.evtname
    LOOP
        BEGIN
            EXECUTE format('DROP EVENT TRIGGER %I', event.evtname);
        EXCEPTION WHEN insufficient_privilege THEN
            kept := kept || event.evtname::text;
        END;
    END LOOP;
    RETURN kept;
END
$$;
