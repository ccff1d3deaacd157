-- Reads a key of the store. No row means that the key was never written, or was deleted.
CREATE OR REPLACE FUNCTION read(
    resource text,
    OUT value jsonb,
    OUT data bytea,
    OUT version bigint,
    OUT token bigint,
    OUT stored_at timestamptz,
    OUT stored_by text
) RETURNS SETOF record
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT f.value, f.data, f.version, coalesce(f.value_token, f.token), coalesce(f.value_at, f.stored_at),
           coalesce(f.value_by, f.stored_by)
    FROM fences AS f
    WHERE f.resource = read.resource AND (f.value IS NOT NULL OR f.data IS NOT NULL)
$$;
