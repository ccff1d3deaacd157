-- Returns the installed revision. Any role that may use the schema may call it.
CREATE OR REPLACE FUNCTION revision() RETURNS integer
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT number FROM installed_revision
$$;
