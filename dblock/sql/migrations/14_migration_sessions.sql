-- Returns the sessions of a migration, found by their application_name. `stale` means that the
-- grant for which a session was opened does not hold the lock any more: end it with
-- pg_terminate_backend() before you run anything.
--
-- A session counts only if its role began the run that its mark names, so that no other role can
-- pass for a migrator. With `may_end`, sessions of roles that the caller may act as count too,
-- because the caller may end them: a migrator may use another role than dblock. Sessions of other
-- databases do not count. `started_at` is NULL if the owner of this schema may not see it.
CREATE OR REPLACE FUNCTION migration_sessions(name text, may_end boolean DEFAULT false)
RETURNS TABLE (pid integer, token bigint, started_at timestamptz, mark text, role_name name, stale boolean)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    -- The sessions with a mark first: a mark ends with a token, and few sessions have one.
    WITH marked AS MATERIALIZED (
        SELECT o.pid, o.backend_start, o.application_name, o.usename, o.usesysid,
               substring(o.application_name FROM ':([0-9]{1,18})$')::bigint AS token
        FROM pg_stat_activity AS o
        WHERE o.datname = current_database() AND o.application_name LIKE 'dblock-migrate:%'
    )
    SELECT a.pid, r.token, a.backend_start, a.application_name, a.usename,
           (l.token = r.token AND l.expires_at > clock_timestamp()) IS NOT TRUE
    FROM marked AS a
    CROSS JOIN LATERAL (
        SELECT o.token, array_agg(o.session_role) AS roles FROM migration_runs AS o
        WHERE o.name = migration_sessions.name AND o.token = a.token GROUP BY o.token
    ) AS r
    LEFT JOIN distributed_locks AS l ON l.name = migration_sessions.name
    WHERE a.application_name = migration_mark(migration_sessions.name, r.token)
      AND (
          a.usename = ANY (r.roles)
          OR migration_sessions.may_end AND pg_has_role(session_user, a.usesysid, 'USAGE')
      )
    ORDER BY r.token, a.pid
$$;
