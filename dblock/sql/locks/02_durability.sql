-- Whether a commit waits for the disk. Hot paths inline these functions, and say so.

-- Makes the commit of this transaction wait for the disk, whatever the default of the server,
-- database or role. A setting that is stricter than `on` stays.
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

-- Lets this transaction commit without waiting for the disk, but only if it has written nothing
-- yet. An earlier write of the transaction may rely on a durable commit.
CREATE OR REPLACE FUNCTION commit_asynchronously() RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    IF pg_current_xact_id_if_assigned() IS NULL THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    RETURN true;
END
$$;
