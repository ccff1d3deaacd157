-- Tells which revision of the schema is installed, so that a client of another one can say so.
CREATE OR REPLACE FUNCTION schema_revision() RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT version_num::text FROM installed_revision
$$;

-- Tells this installation from one in another database, for a transaction that must be in this one.
CREATE OR REPLACE FUNCTION installation() RETURNS uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT installation FROM token_timeline
$$;
