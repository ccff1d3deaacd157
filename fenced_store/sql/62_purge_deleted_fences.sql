-- Deletes the fences of deleted rows of protected tables that are older than this, and returns how
-- many. For the owner only. Choose an age that no paused writer can reach: a writer that resumes
-- after that is not refused any more. Also calls purge_dropped_tables().
CREATE OR REPLACE FUNCTION purge_deleted_fences(older_than interval) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    deleted bigint;
BEGIN
    IF older_than IS NULL OR older_than < '1 day' THEN
        RAISE EXCEPTION 'Fences are kept for at least a day; got %.', coalesce(older_than::text, 'nothing')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM purge_dropped_tables();
    -- Wait for no transaction that has such a fence. It is deleted the next time.
    DELETE FROM fences AS f
    WHERE f.resource IN (
        SELECT o.resource FROM fences AS o
        WHERE o.purgeable AND o.stored_at < clock_timestamp() - older_than FOR UPDATE SKIP LOCKED
    );
    GET DIAGNOSTICS deleted = ROW_COUNT;
    RETURN deleted;
END
$$;
