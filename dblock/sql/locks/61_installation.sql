-- Returns the UUID of this installation. A client compares it to be sure that a transaction of its
-- caller is in this database.
CREATE OR REPLACE FUNCTION installation() RETURNS uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT installation FROM token_clock
$$;
