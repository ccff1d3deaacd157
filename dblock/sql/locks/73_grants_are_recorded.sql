-- Returns whether the history also has every grant and release.
CREATE OR REPLACE FUNCTION grants_are_recorded() RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT EXISTS (
        SELECT FROM pg_trigger AS t WHERE t.tgrelid = 'distributed_locks'::regclass AND t.tgname = 'record_grant_change'
    )
$$;
