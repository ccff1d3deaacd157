-- Tells which revision of the schema is installed, so that a client of another one can say so.
CREATE OR REPLACE FUNCTION schema_revision() RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT version_num::text FROM installed_revision
$$;
