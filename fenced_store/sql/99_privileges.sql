-- Lets only the owner call functions until `dblock fence grant`, and lets no other role touch a
-- table.
DO $$
DECLARE
    here CONSTANT oid := quote_ident(current_schema())::regnamespace;
    thing record;
BEGIN
    EXECUTE format('REVOKE ALL ON ALL FUNCTIONS IN SCHEMA %I FROM PUBLIC', current_schema());
    FOR thing IN
        SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS grantee
        FROM pg_namespace AS n, aclexplode(n.nspacl) AS a
        WHERE n.oid = here AND a.grantee <> n.nspowner AND a.privilege_type = 'CREATE'
    LOOP
        -- A role that may create objects here could shadow a function that the functions of this
        -- schema call with their owner's privileges.
        EXECUTE format('REVOKE CREATE ON SCHEMA %I FROM %s', current_schema(), thing.grantee);
    END LOOP;
    IF current_setting('fenced_store.first_install', true) = 'on' THEN
        FOR thing IN
            SELECT DISTINCT a.grantee::regrole AS grantee
            FROM pg_proc AS p, aclexplode(p.proacl) AS a
            WHERE p.pronamespace = here AND a.grantee NOT IN (0, p.proowner)
        LOOP
            EXECUTE format('REVOKE ALL ON ALL FUNCTIONS IN SCHEMA %I FROM %s', current_schema(), thing.grantee);
        END LOOP;
    END IF;
    FOR thing IN
        SELECT DISTINCT c.oid::regclass AS name, CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END AS kind,
               CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS grantee
        FROM pg_class AS c, aclexplode(c.relacl) AS a
        WHERE c.relnamespace = here AND a.grantee <> c.relowner AND c.relkind IN ('r', 'S')
    LOOP
        -- Privileges from ALTER DEFAULT PRIVILEGES.
        EXECUTE format('REVOKE ALL ON %s %s FROM %s', thing.kind, thing.name, thing.grantee);
    END LOOP;
END
$$;
