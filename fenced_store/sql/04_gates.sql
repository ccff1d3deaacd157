-- Waits for the transactions that are writing a row or a table which is protected per row, and
-- blocks other writers until the end of the transaction. guard_row() passes through the same gates,
-- which are advisory locks: one for the table, and 64 that its rows share. The rows share gates
-- because each lock that is held takes memory of all sessions, and one statement may write a
-- million rows.
CREATE OR REPLACE FUNCTION lock_gate(table_resource text, resource text) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    IF resource = table_resource THEN
        PERFORM pg_advisory_xact_lock(hashtext(table_resource), 64);
    ELSE
        PERFORM pg_advisory_xact_lock_shared(hashtext(table_resource), 64);
        PERFORM pg_advisory_xact_lock(hashtext(table_resource), hashtext(resource) & 63);
    END IF;
END
$$;
