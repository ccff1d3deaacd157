-- Notes a refusal that ended in an error, and so undid its own note. For the client that was told of it, over another
-- connection.
CREATE OR REPLACE FUNCTION record_rejection(
    resource text, offered bigint, stored bigint, stored_at timestamptz, stored_by text, writer text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM insert_rejection(
        record_rejection.resource, record_rejection.offered, NULL, record_rejection.stored, NULL, record_rejection.stored_at,
        record_rejection.stored_by, record_rejection.writer, true
    );
END
$$;

-- Returns the highest token that any fence here has seen, in protected tables too; 0 for none. Runs with the caller's
-- rights, who must be able to read them all: the owner, usually.
CREATE OR REPLACE FUNCTION high_water() RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    highest bigint;
    target regclass;
BEGIN
    SELECT greatest(max(f.token), 0) INTO highest FROM fences AS f;
    FOR target IN SELECT p.target FROM protected_tables() AS p WHERE p.per = 'row' LOOP
        highest := greatest(highest, highest_token(target));
    END LOOP;
    RETURN highest;
END
$$;

-- Forgets the fences that deleted rows of protected tables have left behind, if they are older than that; returns how many.
-- For the owner, and for an age that no paused writer can reach: whoever wakes up after that is not refused any more.
CREATE OR REPLACE FUNCTION purge_deleted_fences(older_than interval) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    gone bigint;
BEGIN
    IF older_than IS NULL OR older_than < '1 day' THEN
        RAISE EXCEPTION 'Fences are kept for a day at least; got %.', coalesce(older_than::text, 'nothing')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    DELETE FROM fences AS f WHERE f.purgeable AND f.stored_at < clock_timestamp() - older_than;
    GET DIAGNOSTICS gone = ROW_COUNT;
    RETURN gone;
END
$$;

-- Tells what is installed. Any role that may use the schema may ask.
CREATE OR REPLACE FUNCTION revision() RETURNS integer
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT number FROM installed_revision
$$;
