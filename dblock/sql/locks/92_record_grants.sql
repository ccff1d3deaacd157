-- Starts or stops recording every grant and release in the history. For the owner only.
CREATE OR REPLACE FUNCTION record_grants(recorded boolean) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    IF recorded THEN
        CREATE OR REPLACE TRIGGER record_grant_change AFTER UPDATE ON distributed_locks FOR EACH ROW
            WHEN (NEW.token <> OLD.token OR (NEW.expires_at = '-infinity' AND OLD.expires_at > '-infinity'))
            EXECUTE FUNCTION record_grant_change();
    ELSE
        DROP TRIGGER IF EXISTS record_grant_change ON distributed_locks;
    END IF;
END
$$;
