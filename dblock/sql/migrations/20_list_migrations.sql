-- Returns the migrations that the ledger knows, in the order of their names, or one of them.
--
-- `phase` is `migrating` (a run holds the lock), `starting` (the lock is held and no run has
-- begun), `interrupted` (the last run was killed or lost its lease, or has not reported its end),
-- `failed`, or `done`. `sessions` has what the sessions of the run are doing, as far as the owner
-- of this schema may see it: pid, state, statement, age of the statement in seconds, how far an
-- index build, a copy or a cluster has come, and up to five sessions that block the session, the
-- oldest transaction first. `runs` has the newest runs, newest first.
CREATE OR REPLACE FUNCTION list_migrations(name text DEFAULT NULL, max_runs integer DEFAULT 5)
RETURNS TABLE (
    name text,
    phase text,
    holder text,
    token bigint,
    since timestamptz,
    version text,
    revision text,
    error text,
    waiting bigint,
    sessions jsonb,
    runs jsonb
)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT n.name,
           CASE
               WHEN l.token = r.token AND r.outcome IS NULL THEN 'migrating'
               WHEN l.token IS NOT NULL THEN 'starting'
               WHEN r.outcome IS NULL THEN 'interrupted'
               WHEN r.outcome = 'succeeded' THEN 'done'
               WHEN r.outcome IN ('failed', 'blocked') THEN 'failed'
               ELSE 'interrupted'
           END,
           l.holder, l.token, coalesce(l.granted_at, r.ended_at, r.started_at), r.version, r.revision, r.error,
           (SELECT count(*) FROM list_waiters(n.name, 1000000)),
           (SELECT coalesce(jsonb_agg(jsonb_build_object(
                'pid', s.pid, 'token', s.token, 'stale', s.stale, 'role', s.role_name,
                'state', a.state, 'wait', a.wait_event, 'statement', nullif(left(a.query, 1000), '<insufficient privilege>'),
                'seconds', round(date_part('epoch', clock_timestamp() - a.query_start)::numeric, 1),
                'progress', coalesce(
                    (SELECT jsonb_build_object('phase', p.phase, 'done', p.blocks_done, 'total', p.blocks_total,
                                               'unit', 'blocks', 'relation', p.relid::regclass::text)
                     FROM pg_stat_progress_create_index AS p WHERE p.pid = s.pid),
                    (SELECT jsonb_build_object('phase', p.phase, 'done', p.heap_blks_scanned, 'total', p.heap_blks_total,
                                               'unit', 'blocks', 'relation', p.relid::regclass::text)
                     FROM pg_stat_progress_cluster AS p WHERE p.pid = s.pid),
                    (SELECT jsonb_build_object('phase', lower(p.command), 'done', p.bytes_processed,
                                               'total', nullif(p.bytes_total, 0), 'unit', 'bytes',
                                               'relation', p.relid::regclass::text)
                     FROM pg_stat_progress_copy AS p WHERE p.pid = s.pid)
                ),
                'blockers', (
                    SELECT coalesce(jsonb_agg(to_jsonb(b) ORDER BY b.seconds DESC), '[]')
                    FROM (
                        SELECT o.pid, o.application_name AS application, o.state,
                               -- The owner may see more than the caller.
                               CASE
                                   WHEN pg_has_role(session_user, 'pg_read_all_stats', 'USAGE')
                                       OR pg_has_role(session_user, o.usesysid, 'USAGE')
                                   THEN nullif(left(o.query, 200), '<insufficient privilege>')
                               END AS statement,
                               round(date_part('epoch', clock_timestamp() - o.xact_start)::numeric, 1) AS seconds
                        FROM pg_stat_activity AS o WHERE o.pid = ANY (pg_blocking_pids(s.pid))
                        ORDER BY o.xact_start LIMIT 5
                    ) AS b
                )
            ) ORDER BY s.pid), '[]')
            FROM migration_sessions(n.name) AS s JOIN pg_stat_activity AS a ON a.pid = s.pid),
           (SELECT coalesce(jsonb_agg(jsonb_build_object(
                'run', o.run, 'token', o.token, 'version', o.version, 'migrator', o.migrator, 'holder', o.holder,
                'from_revision', o.from_revision, 'revision', o.revision, 'started_at', o.started_at,
                'ended_at', o.ended_at,
                'seconds', round(date_part('epoch', coalesce(o.ended_at, clock_timestamp()) - o.started_at)::numeric, 3),
                'outcome', o.outcome, 'error', o.error, 'cleared_at', o.cleared_at, 'cleared_by', o.cleared_by,
                'clear_reason', o.clear_reason
            ) ORDER BY o.run DESC), '[]')
            FROM (
                SELECT * FROM migration_runs AS m WHERE m.name = n.name ORDER BY m.run DESC
                LIMIT list_migrations.max_runs
            ) AS o)
    FROM (SELECT DISTINCT m.name FROM migration_runs AS m) AS n
    JOIN LATERAL (
        SELECT * FROM migration_runs AS m WHERE m.name = n.name ORDER BY m.run DESC LIMIT 1
    ) AS r ON true
    LEFT JOIN distributed_locks AS l ON l.name = n.name AND l.expires_at > clock_timestamp()
    WHERE list_migrations.name IS NULL OR n.name = list_migrations.name
    ORDER BY n.name
$$;
