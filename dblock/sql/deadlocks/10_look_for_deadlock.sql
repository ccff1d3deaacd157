-- Notes which tokens the thread or task of a waiting attempt holds, and looks for a deadlock: a
-- cycle of waits through this attempt's ticket. A client calls it for a waiter that has waited for
-- half a second and holds another lock, and again every half second. See docs/reference/sql.md.
--
-- Every cycle has one victim: the youngest ticket of the cycle. Only the victim's own call ends a
-- wait: it deletes the ticket, and `victim` is true. A call for another ticket of the cycle
-- notifies the victim's client, so that the victim's call comes at once. `cycle` has the waits of
-- the cycle as JSON, NULL if there is none.
--
-- Two cycles may share a ticket, where a lock has several holders. The victim of the first may then
-- end the second too. So a call that found its ticket to be the victim locks all tickets of the
-- cycle, in order, and searches again. The call that comes second no longer finds the cycle.
--
-- `ended` has attempts that do not wait any more. Their notes are deleted.
CREATE OR REPLACE FUNCTION look_for_deadlock(
    name text,
    attempt uuid,
    holds bigint[],
    ended uuid[] DEFAULT '{}',
    OUT victim boolean,
    OUT cycle jsonb
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_asynchronously();
    patience text := current_setting('lock_timeout');
    noted bigint[] := ARRAY(
        SELECT DISTINCT h FROM unnest(look_for_deadlock.holds) AS h WHERE h IS NOT NULL ORDER BY h LIMIT 1000
    );
    found_cycle record;
    ignored text;
BEGIN
    victim := false;
    IF cardinality(look_for_deadlock.ended) > 0 THEN
        DELETE FROM waiting_holds AS w WHERE w.attempt = ANY (look_for_deadlock.ended);
    END IF;
    IF cardinality(noted) = 0 OR NOT sees_latest_commits() OR NOT EXISTS (
        SELECT FROM lock_tickets AS t
        WHERE t.attempt = look_for_deadlock.attempt AND t.name = look_for_deadlock.name
    ) THEN
        RETURN;
    END IF;
    -- A repeated call writes nothing.
    IF noted <> ARRAY(
        SELECT w.token FROM waiting_holds AS w
        WHERE w.attempt = look_for_deadlock.attempt AND w.name = look_for_deadlock.name ORDER BY w.token
    ) THEN
        -- A caller of acquire_all() waits for one lock after the other, with the same attempt.
        DELETE FROM waiting_holds AS w
        WHERE w.attempt = look_for_deadlock.attempt AND (w.token <> ALL (noted) OR w.name <> look_for_deadlock.name);
        INSERT INTO waiting_holds (attempt, token, name)
        SELECT look_for_deadlock.attempt, n, look_for_deadlock.name FROM unnest(noted) AS n
        ON CONFLICT DO NOTHING;
    END IF;
    found_cycle := describe_cycle(look_for_deadlock.name, look_for_deadlock.attempt);
    IF found_cycle.through_sessions THEN
        -- The locks of sessions were read after the tickets. Both are read again: a cycle that is
        -- still there does not consist of waits of different moments.
        found_cycle := describe_cycle(look_for_deadlock.name, look_for_deadlock.attempt);
    END IF;
    cycle := found_cycle.waits;
    IF cycle IS NULL THEN
        RETURN;
    END IF;
    IF found_cycle.youngest <> look_for_deadlock.attempt THEN
        ready := pg_notification_queue_usage() < 0.9 AND pg_notify(
            'dblock_' || replace(found_cycle.youngest_client::text, '-', ''), 'deadlock ' || found_cycle.youngest
        ) IS NOT NULL;
        RETURN;
    END IF;
    BEGIN
        ignored := set_config('lock_timeout', '100ms', true);
        PERFORM 1 FROM lock_tickets AS t
        WHERE t.attempt = ANY (found_cycle.attempts)
        ORDER BY t.attempt, t.name
        FOR UPDATE;
        ignored := set_config('lock_timeout', patience, true);
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        -- A ticket is being redeemed or given up, or another call decides. The next call finds out.
        cycle := NULL;
        RETURN;
    END;
    found_cycle := describe_cycle(look_for_deadlock.name, look_for_deadlock.attempt);
    cycle := found_cycle.waits;
    IF found_cycle.youngest = look_for_deadlock.attempt THEN
        victim := abandon(look_for_deadlock.name, look_for_deadlock.attempt, only_ticket => true);
        DELETE FROM waiting_holds AS w WHERE w.attempt = look_for_deadlock.attempt;
    END IF;
END
$$;
