-- Makes the commit of this transaction wait for the disk, whatever the default of the server,
-- database or role.
CREATE OR REPLACE FUNCTION commit_durably() RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    RETURN true;
END
$$;
