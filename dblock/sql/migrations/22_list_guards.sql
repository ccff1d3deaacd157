-- Returns the schemas in which DDL needs a migration that holds the lock, and the names of these
-- migrations. `active` means that the event triggers exist and are enabled. Without them nothing is
-- refused.
CREATE OR REPLACE FUNCTION list_guards()
RETURNS TABLE (schema_name text, names text[], active boolean)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT g.schema_name, array_agg(g.name ORDER BY g.name),
           (SELECT count(DISTINCT e.evtevent) = 3 FROM pg_event_trigger AS e
            WHERE e.evtfoid = to_regprocedure('guard_ddl()') AND e.evtenabled IN ('O', 'A'))
    FROM ddl_guards AS g
    GROUP BY g.schema_name
    ORDER BY g.schema_name
$$;
