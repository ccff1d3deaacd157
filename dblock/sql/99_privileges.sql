-- Lets only the owner call functions until `dblock grant ROLE`, and lets no other role touch a
-- table, whatever ALTER DEFAULT PRIVILEGES says. A role that has a privilege already may also call
-- the functions that this revision adds to it.
DO $$
DECLARE
    here CONSTANT oid := quote_ident(current_schema())::regnamespace;
    -- The functions of `dblock grant --may see` and of `--may force-release`. Below, the privilege
    -- to call the first function of each list, or try_acquire, shows which roles have it.
    inspecting CONSTANT text[] := '{list_locks,list_waiters,list_history,list_presence,wait_graph,grants_are_recorded,list_migrations,list_guards,list_candidates,list_schedule_events,lock_metrics}';
    forcing CONSTANT text[] := '{force_release,wake_queue,delete_lock}';
    -- The functions of both `--may lock` and another privilege.
    shared CONSTANT text[] := '{migration_state,invalid_indexes,election_leader,list_terms,list_schedules,slot_outcome,list_barriers}';
    thing record;
BEGIN
    EXECUTE format('REVOKE ALL ON ALL FUNCTIONS IN SCHEMA %I FROM PUBLIC', current_schema());
    IF current_setting('dblock.first_install', true) = 'on' THEN
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
        EXECUTE format('REVOKE ALL ON %s %s FROM %s', thing.kind, thing.name, thing.grantee);
    END LOOP;
    FOR thing IN
        SELECT p.oid::regprocedure AS name, a.grantee::regrole AS grantee
        FROM pg_proc AS granted, aclexplode(granted.proacl) AS a, pg_proc AS p
        WHERE granted.pronamespace = here AND a.grantee NOT IN (0, granted.proowner)
          AND p.pronamespace = here AND p.prosecdef AND p.prorettype <> 'event_trigger'::regtype
          AND CASE granted.proname
              WHEN 'list_locks' THEN p.proname = ANY (inspecting || shared)
              WHEN 'force_release' THEN p.proname = ANY (forcing)
              WHEN 'try_acquire' THEN p.proname <> ALL (inspecting || forcing) OR p.proname = 'wake_queue'
              ELSE false
          END
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', thing.name, thing.grantee);
    END LOOP;
END
$$;
