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
    SELECT a.pid, r.token, a.backend_start, a.application_name, a.usename,
           (l.token = r.token AND l.expires_at > clock_timestamp()) IS NOT TRUE
    FROM (
        SELECT o.token, array_agg(o.session_role) AS roles FROM migration_runs AS o
        WHERE o.name = migration_sessions.name GROUP BY o.token
    ) AS r
    JOIN pg_stat_activity AS a
        ON a.application_name = migration_mark(migration_sessions.name, r.token)
        AND (
            a.usename = ANY (r.roles)
            OR migration_sessions.may_end AND pg_has_role(session_user, a.usesysid, 'USAGE')
        )
    LEFT JOIN distributed_locks AS l ON l.name = migration_sessions.name
    WHERE a.datname = current_database()
    ORDER BY r.token, a.pid
$$;
