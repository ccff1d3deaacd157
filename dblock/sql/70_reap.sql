-- Deletes locks that have been free since before `idle`, at most `batch` of them, and returns how many went.
--
-- Takes nothing that lives: a row is locked first and looked at again under the lock, and one that somebody else has
-- locked (to grant it, say) is passed over. Lowers no token: the sequence goes on, whatever becomes of the rows. Any
-- number may run at once. A lock that somebody waits for stays; the traces of clients that are long dead go, with the
-- places in line that they left behind, and so does the history of more than 30 days ago. For the owner alone.
CREATE OR REPLACE FUNCTION reap(idle interval DEFAULT '1 day', batch integer DEFAULT 1000) RETURNS integer
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    gone integer := 0;
    tidied boolean := false;
    seen record;
    one text;
BEGIN
    IF idle IS NULL OR idle < '0 seconds' OR batch IS NULL OR batch < 1 THEN
        RAISE EXCEPTION 'A reaper takes what was idle for 0 seconds or more, at least one row at a time; got % and %.',
            idle, batch
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    DELETE FROM lock_tickets AS t
    WHERE NOT EXISTS (SELECT FROM lock_clients AS c WHERE c.client = t.client AND c.seen_until > clock_timestamp() - idle)
      AND t.since <= clock_timestamp() - idle;
    DELETE FROM lock_clients AS c WHERE c.seen_until <= clock_timestamp() - greatest(idle, '1 minute');
    DELETE FROM lock_presence AS p
    USING (
        SELECT o.presence FROM lock_presence AS o
        WHERE o.incarnation <> pg_postmaster_start_time() OR o.gone_since <= clock_timestamp() - greatest(idle, '1 minute')
        FOR UPDATE SKIP LOCKED
    ) AS old
    WHERE p.presence = old.presence;
    LOOP
        FOR seen IN
            DELETE FROM distributed_locks AS d
            WHERE d.name = ANY (ARRAY(
                SELECT l.name FROM distributed_locks AS l
                WHERE l.expires_at <= clock_timestamp() - idle
                  AND NOT l.waiting
                  AND coalesce(l.released_at, '-infinity') <= clock_timestamp() - idle
                LIMIT batch - gone
                FOR UPDATE SKIP LOCKED
            ))
            RETURNING d.name, d.token, d.holder, d.expires_at
        LOOP
            gone := gone + 1;
            -- A lease that ran out, and that no later grant has found.
            IF seen.expires_at > '-infinity' THEN
                PERFORM record_event(seen.name, seen.token, 'expired', seen.holder, seen.expires_at);
            END IF;
        END LOOP;
        EXIT WHEN gone >= batch OR tidied;
        -- What reads all of a table comes when nothing else is left, and not again with each of a thousand batches.
        -- It waits for nobody: what was taken above is nobody's until our end. A grant in somebody's long transaction, or
        -- another reaper, may be at work on the same.
        DELETE FROM lock_history AS h
        WHERE h.number = ANY (ARRAY(
            SELECT o.number FROM lock_history AS o
            WHERE o.at <= clock_timestamp() - greatest(idle, '30 days')
            FOR UPDATE SKIP LOCKED
        ));
        FOR one IN SELECT l.name FROM distributed_locks AS l WHERE l.waiting AND l.expires_at <= clock_timestamp() LIMIT batch LOOP
            PERFORM queue_is_empty(one);
            tidied := true;
        END LOOP;
        EXIT WHEN NOT tidied;
    END LOOP;
    -- Presences that are gone and that nobody has looked at: noted now, and taken the next time. Whether a mark is held is
    -- looked up and not tried: all that were tried would be ours until the end, and the server has room for so many locks
    -- only. Last, because a client that is there all the same has to say so within moments, and would wait for our end.
    UPDATE lock_presence AS p SET gone_since = clock_timestamp()
    FROM (
        SELECT o.presence FROM lock_presence AS o
        WHERE o.gone_since IS NULL AND o.session <> pg_backend_pid() AND o.advisory_key NOT IN (
            SELECT (k.classid::bigint << 32) | k.objid::bigint
            FROM pg_locks AS k JOIN pg_database AS d ON d.oid = k.database AND d.datname = current_database()
            WHERE k.locktype = 'advisory' AND k.objsubid = 1 AND k.granted
        )
        FOR UPDATE SKIP LOCKED
    ) AS dead
    WHERE p.presence = dead.presence;
    RETURN gone;
END
$$;
