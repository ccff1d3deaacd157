-- Drops what is left of protected tables that no longer exist: their gates, their functions and
-- their record. Returns the number of these tables, at most `batch`, because each takes about a
-- hundred locks. For the owner only. The fences stay, so a new table with the same name does not
-- start below them.
--
-- Leaves the remains of a table for the next call if a transaction uses them, or if a former
-- partition of the table still has its TRUNCATE trigger, which needs the gates.
CREATE OR REPLACE FUNCTION purge_dropped_tables(batch integer DEFAULT 10) RETURNS integer
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET lock_timeout = '100ms'
AS $$
#variable_conflict use_column
DECLARE
    dropped record;
    guard_function regprocedure;
    purged integer := 0;
BEGIN
    FOR dropped IN
        SELECT p.resource, p.target FROM protections AS p
        WHERE NOT EXISTS (SELECT FROM pg_class AS c WHERE c.oid = p.target)
          AND NOT EXISTS (
              SELECT FROM pg_trigger AS t
              WHERE t.tgname = 'zz_fenced_store_truncate'
                AND position(convert_to(p.resource, getdatabaseencoding()) || E'\\x00'::bytea IN t.tgargs) = 1
          )
        ORDER BY p.resource
    LOOP
        EXIT WHEN purged >= purge_dropped_tables.batch;
        BEGIN
            -- As in reserve_resource(): from here on no other transaction protects a table of this
            -- name, or claims it. A transaction that is doing so is waited for only briefly, as
            -- lock_timeout says.
            INSERT INTO fences (resource, token, stored_at, purgeable)
            VALUES (dropped.resource, 0, clock_timestamp(), true)
            ON CONFLICT DO NOTHING;
            PERFORM FROM fences AS f WHERE f.resource = dropped.resource FOR UPDATE SKIP LOCKED;
            CONTINUE WHEN NOT FOUND;
            UPDATE fences AS f SET stored_at = f.stored_at WHERE f.resource = dropped.resource;
            -- A new table of this name may have been protected since.
            DELETE FROM protections AS p WHERE p.resource = dropped.resource AND p.target = dropped.target;
            CONTINUE WHEN NOT FOUND;
            FOR guard_function IN
                SELECT p.oid FROM pg_proc AS p
                WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
                  AND p.proname ~ '^guard_[0-9a-f]{24}$'
                  AND position('pass_' || gate_of(dropped.resource, dropped.resource) || '(' IN p.prosrc) > 0
            LOOP
                EXECUTE format('DROP FUNCTION %s', guard_function);
            END LOOP;
            PERFORM drop_gates(dropped.resource);
            purged := purged + 1;
        EXCEPTION WHEN lock_not_available OR dependent_objects_still_exist THEN
            NULL;  -- in use
        END;
    END LOOP;
    RETURN purged;
END
$$;
