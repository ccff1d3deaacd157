-- The history of a lock: what happened to its grants. These events are always recorded: a lease
-- that expired (`expired`, found by the next grant or by the reaper), a holder whose process died
-- (`died`), a holder that was told to release (`forced`), a lock that was freed by force at once
-- (`forced_now`). Grants and releases (`granted`, `released`) are recorded only after
-- record_grants(true), because a row for each costs a good part of the grant itself.

-- Records an event, and deletes events older than the lock's newest hundred.
CREATE OR REPLACE FUNCTION record_event(
    name text, token bigint, event text, holder text, at timestamptz, actor text DEFAULT NULL, reason text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO lock_history (at, name, token, event, holder, actor, reason)
    VALUES (record_event.at, record_event.name, record_event.token, record_event.event, record_event.holder,
            record_event.actor, record_event.reason);
    DELETE FROM lock_history AS h
    WHERE h.name = record_event.name AND h.number < (
        SELECT o.number FROM lock_history AS o WHERE o.name = record_event.name ORDER BY o.number DESC OFFSET 99 LIMIT 1
    );
END
$$;

-- Records how the grant in a lock's row ended. The caller has locked the row, and has not yet
-- replaced the grant. Without `at`, the grant ended at its deadline.
CREATE OR REPLACE FUNCTION record_grant_end(name text, event text, at timestamptz DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
BEGIN
    PERFORM record_event(l.name, l.token, record_grant_end.event, l.holder, coalesce(record_grant_end.at, l.expires_at))
    FROM distributed_locks AS l WHERE l.name = record_grant_end.name AND l.expires_at > '-infinity';
END
$$;

-- Records a grant or a release, as a trigger that record_grants() creates. A holder that died and a
-- lock that was freed by force have an event already.
CREATE OR REPLACE FUNCTION record_grant_change() RETURNS trigger
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    IF NEW.kind IN ('read-write', 'semaphore') THEN
        -- The grants of a shared lock are recorded under the names of its shares.
        RETURN NULL;
    ELSIF NEW.token <> OLD.token THEN
        PERFORM record_event(NEW.name, NEW.token, 'granted', NEW.holder, NEW.granted_at);
    ELSIF NOT EXISTS (
        SELECT FROM lock_history AS h
        WHERE h.name = OLD.name AND h.token = OLD.token AND h.event IN ('died', 'forced_now')
    ) THEN
        PERFORM record_event(OLD.name, OLD.token, 'released', OLD.holder, clock_timestamp());
    END IF;
    RETURN NULL;
END
$$;
