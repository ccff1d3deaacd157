-- Reads the latest versions of a key, newest first.
CREATE OR REPLACE FUNCTION history(
    resource text,
    max_rows integer DEFAULT NULL,
    OUT value jsonb,
    OUT data bytea,
    OUT version bigint,
    OUT token bigint,
    OUT stored_at timestamptz,
    OUT stored_by text
) RETURNS SETOF record
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT v.value, v.data, v.version, v.token, v.stored_at, v.stored_by
    FROM versions AS v
    WHERE v.resource = history.resource
    ORDER BY v.version DESC
    LIMIT history.max_rows
$$;
