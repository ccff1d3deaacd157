-- Creates dblock's schema, or accepts an empty one that a DBA has created for dblock alone. The
-- install fills in the schema's name, as an identifier and as a literal. The schema must not be
-- open to other roles: a role that may create objects in it could add a function, which dblock's
-- functions would then call with their owner's privileges.
DO $make$
DECLARE
    space pg_catalog.pg_namespace;
    stranger pg_catalog.text;
BEGIN
    SELECT * INTO space FROM pg_catalog.pg_namespace WHERE nspname = {literal};
    IF NOT FOUND THEN
        CREATE SCHEMA {name};
        FOR stranger IN
            SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::pg_catalog.regrole::pg_catalog.text END
            FROM pg_catalog.pg_namespace, pg_catalog.aclexplode(nspacl)
            WHERE nspname = {literal} AND grantee <> nspowner
        LOOP
            -- ALTER DEFAULT PRIVILEGES may have granted these.
            EXECUTE pg_catalog.format('REVOKE ALL ON SCHEMA %I FROM ', {literal}) || stranger;
        END LOOP;
        RETURN;
    END IF;
    IF EXISTS (
        SELECT FROM pg_catalog.pg_class WHERE relnamespace = space.oid AND relname = 'installed_revision'
    ) THEN
        RAISE EXCEPTION 'Schema % is installed already.', quote_literal(space.nspname)
            USING ERRCODE = 'duplicate_schema';
    END IF;
    -- Another install at the same time may be probing the server in this schema.
    SELECT relname INTO stranger FROM pg_catalog.pg_class
    WHERE relnamespace = space.oid AND relname NOT LIKE E'dblock\\_probe\\_%';
    IF NOT FOUND THEN
        SELECT proname INTO stranger FROM pg_catalog.pg_proc
        WHERE pronamespace = space.oid AND proname NOT LIKE E'dblock\\_probe\\_%';
    END IF;
    IF FOUND THEN
        RAISE EXCEPTION 'Schema % already holds %, which is not dblock''s. '
            'dblock needs its own schema: choose another name with --schema.',
            quote_literal(space.nspname), quote_literal(stranger)
            USING ERRCODE = {sqlstate};
    END IF;
    IF space.nspowner <> (SELECT oid FROM pg_catalog.pg_roles WHERE rolname = current_user)
        OR EXISTS (
            SELECT FROM pg_catalog.aclexplode(space.nspacl)
            WHERE privilege_type = 'CREATE' AND grantee <> space.nspowner
        )
    THEN
        RAISE EXCEPTION 'Roles other than % may create objects in schema %, and so could reach the locks with '
            'its privileges. Make it the only role that may, or let the install create the schema.',
            quote_literal(current_user), quote_literal(space.nspname)
            USING ERRCODE = {sqlstate};
    END IF;
END
$make$
