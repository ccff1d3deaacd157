-- Returns the sessions of a migration, found by their application_name. `stale` means that the
-- grant for which a session was opened does not hold the lock any more: end it with
-- pg_terminate_backend() before you run anything.
--
-- Only sessions count whose role has begun the run that they name, so that no other role can pass
-- for a migrator. A session that is not connected to this database does not count.
CREATE OR REPLACE FUNCTION migration_sessions(name text)
RETURNS TABLE (pid integer, token bigint, started_at timestamptz, mark text, role_name name, stale boolean)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT a.pid, r.token, a.backend_start, a.application_name, a.usename,
           (l.token = r.token AND l.expires_at > clock_timestamp()) IS NOT TRUE
    FROM (
        SELECT DISTINCT o.token, o.session_role FROM migration_runs AS o WHERE o.name = migration_sessions.name
    ) AS r
    JOIN pg_stat_activity AS a
        ON a.application_name = migration_mark(migration_sessions.name, r.token) AND a.usename = r.session_role
    LEFT JOIN distributed_locks AS l ON l.name = migration_sessions.name
    WHERE a.datname = current_database()
    ORDER BY r.token, a.pid
$$;
