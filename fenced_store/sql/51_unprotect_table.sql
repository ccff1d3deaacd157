-- Removes the fence of a table. False means that it had none. The table's own fence keeps the
-- highest token of its rows, so that a later protection does not start below it.
CREATE OR REPLACE FUNCTION unprotect_table(
    target regclass,
    drop_columns boolean DEFAULT true,
    must_exist boolean DEFAULT true,
    keep_highest boolean DEFAULT true
) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET quote_all_identifiers = off
AS $$
DECLARE
    was record;
    leaf regclass;
    highest bigint;
BEGIN
    SELECT * INTO was FROM protected_tables() AS p WHERE p.target = unprotect_table.target;
    IF NOT FOUND THEN
        IF must_exist THEN
            RAISE EXCEPTION '% is not protected.', target USING ERRCODE = 'undefined_object';
        END IF;
        RETURN false;
    END IF;
    PERFORM reserve_resource(target);
    PERFORM lock_table(target, 'ACCESS EXCLUSIVE');
    IF was.per = 'row' AND (drop_columns OR keep_highest) THEN
        highest := greatest(highest_token(target), highest_fence(was.resource));
    ELSE
        highest := highest_fence(was.resource);
    END IF;
    IF drop_columns OR keep_highest THEN
        PERFORM preserve_fence(was.resource, highest);
        -- The table may have been renamed. A later protection would use the new name.
        PERFORM preserve_fence(
            (SELECT format('%I.%I', n.nspname, c.relname)
             FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = target), highest
        );
    END IF;
    EXECUTE format('DROP TRIGGER IF EXISTS zz_fenced_store ON %s', target);
    EXECUTE format('DROP TRIGGER IF EXISTS zz_fenced_store_inserted ON %s', target);
    EXECUTE format('DROP TRIGGER IF EXISTS zz_fenced_store_renamed ON %s', target);
    FOR leaf IN
        SELECT t.relid FROM pg_partition_tree(target) AS t
        UNION SELECT target
        -- Former partitions, if the caller still owns them.
        UNION SELECT t.tgrelid::regclass FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
        WHERE t.tgname = 'zz_fenced_store_truncate' AND pg_has_role(c.relowner, 'USAGE')
          AND position(convert_to(was.resource, getdatabaseencoding()) || E'\\x00'::bytea IN t.tgargs) = 1
    LOOP
        EXECUTE format('DROP TRIGGER IF EXISTS zz_fenced_store_truncate ON %s', leaf);
    END LOOP;
    IF was.per = 'row' AND drop_columns AND owns_fence_columns(target) THEN
        EXECUTE format('ALTER TABLE %s DROP COLUMN fence_token, DROP COLUMN fence_at', target);
    END IF;
    IF must_exist THEN
        PERFORM record_unprotection(target);
    END IF;
    RETURN true;
END
$$;
