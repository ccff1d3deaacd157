-- Returns for each held grant that is tied to a presence whether the session of that presence still
-- lives, with the process number of the session. A grant that is not listed is tied to no session,
-- or nothing is known about its session: then only its deadline tells when it ends.
--
-- This only looks. The grace of a presence begins when a waiter or another client finds its session
-- gone, and not here.
CREATE OR REPLACE FUNCTION list_presence(name text DEFAULT NULL)
RETURNS TABLE (name text, token bigint, alive boolean, session integer, gone_since timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    WITH held_keys AS MATERIALIZED (
        SELECT k.pid, (k.classid::bigint << 32) | k.objid::bigint AS key
        FROM pg_locks AS k
        WHERE k.locktype = 'advisory' AND k.objsubid = 1 AND k.granted AND k.mode = 'ExclusiveLock'
          AND k.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
    )
    SELECT l.name, l.token, EXISTS (SELECT FROM held_keys AS h WHERE h.key = p.advisory_key AND h.pid = p.session),
           p.session, p.gone_since
    FROM distributed_locks AS l
    JOIN lock_presence AS p ON p.presence = l.presence AND p.incarnation = pg_postmaster_start_time()
    WHERE l.expires_at > clock_timestamp()
      AND (list_presence.name IS NULL OR l.name = list_presence.name OR l.head = list_presence.name)
$$;
