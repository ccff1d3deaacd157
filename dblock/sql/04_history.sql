-- The history of a lock: what befell its grants. Always noted: a lease that ran out (`expired`, found by the next grant or
-- the reaper), a holder whose process died (`died`), a holder told to let go (`forced`), a lock taken away (`forced_now`). Grants and releases
-- (`granted`, `released`) only where record_grants() has said so: a row for each costs a good part of the grant itself.

-- Notes an event, and lets go of what is older than the lock's last hundred.
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

-- Notes how the grant in a lock's row ended, its row held, before another takes its place; by itself at its deadline.
CREATE OR REPLACE FUNCTION record_grant_end(name text, event text, at timestamptz DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
BEGIN
    PERFORM record_event(l.name, l.token, record_grant_end.event, l.holder, coalesce(record_grant_end.at, l.expires_at))
    FROM distributed_locks AS l WHERE l.name = record_grant_end.name AND l.expires_at > '-infinity';
END
$$;

-- Notes a grant or its release, where that is asked for. A lock that the dead held, or that was taken away, says so itself.
CREATE OR REPLACE FUNCTION record_grant_change() RETURNS trigger
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    IF NEW.token <> OLD.token THEN
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

-- Has every grant and release noted from now on, or no more. For the owner alone.
CREATE OR REPLACE FUNCTION record_grants(recorded boolean) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
BEGIN
    IF recorded THEN
        CREATE OR REPLACE TRIGGER record_grant_change AFTER UPDATE ON distributed_locks FOR EACH ROW
            WHEN (NEW.token <> OLD.token OR (NEW.expires_at = '-infinity' AND OLD.expires_at > '-infinity'))
            EXECUTE FUNCTION record_grant_change();
    ELSE
        DROP TRIGGER IF EXISTS record_grant_change ON distributed_locks;
    END IF;
END
$$;
