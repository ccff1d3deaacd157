-- Returns the installed revision of the schema, so that a client of another revision can report it.
CREATE OR REPLACE FUNCTION schema_revision() RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT version_num::text FROM installed_revision
$$;
