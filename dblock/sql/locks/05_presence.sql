-- Returns whether no session has this process number. Any role may ask. The statistics that this
-- transaction has read may be older than the session, so they are read again.
CREATE OR REPLACE FUNCTION session_is_gone(session integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    ignored boolean;
BEGIN
    ignored := pg_stat_clear_snapshot() IS NULL;
    RETURN NOT EXISTS (SELECT FROM pg_stat_get_activity(session_is_gone.session));
END
$$;

-- Returns the key of the advisory lock that the session of a presence holds. All sessions see the
-- key in pg_locks. It does not reveal the presence.
CREATE OR REPLACE FUNCTION presence_key(presence uuid) RETURNS bigint
LANGUAGE sql IMMUTABLE
AS $$
    SELECT uuid_hash_extended(presence, 0)
$$;

-- Returns whether a presence is known in this incarnation of the server, as another session's.
CREATE OR REPLACE FUNCTION presence_is_registered(presence uuid) RETURNS boolean
LANGUAGE plpgsql STABLE
AS $$
#variable_conflict use_column
BEGIN
    RETURN EXISTS (
        SELECT FROM lock_presence AS p
        WHERE p.presence = presence_is_registered.presence AND p.incarnation = pg_postmaster_start_time()
          AND p.session <> pg_backend_pid()
    );
END
$$;

-- Returns how many seconds of grace a presence has left after its session has ended. Zero or less
-- means that other clients may take its locks. NULL means that the session is alive, or that
-- nothing is known about it.
--
-- A presence is a session that holds an advisory lock. Its key is a hash of the random presence.
-- The lock ends with the session. A key counts only in the incarnation of the server in which it
-- was registered: a restart changes the postmaster's start time, and a crash, a promotion or a
-- restore empties the unlogged table. The grace starts when a session first finds the advisory lock
-- gone. So a client whose session was closed has at least that long to withdraw its presence or to
-- stop trusting its leases.
--
-- Any role may wait for a key that it has seen in pg_locks, and has the advisory lock when the
-- session ends. For the presence of a holder (`of_holder`) it is therefore also enough that the
-- session is gone. Only if another session has the same process number by then, the ttl decides.
--
-- A session that takes the locks of a presence (`for_takeover`) keeps the presence's row locked
-- until the end of its transaction. A client that withdraws the presence (withdraw_presence) either
-- waits for that and then sees which locks were taken, or locks the row first, and then no lock is
-- taken. In a transaction with an older snapshot, the row may have changed since: nothing is known
-- then.
CREATE OR REPLACE FUNCTION remaining_grace(presence uuid, for_takeover boolean, of_holder boolean)
RETURNS double precision
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    seen record;
BEGIN
    SELECT p.advisory_key, p.session INTO seen
    FROM lock_presence AS p
    WHERE p.presence = remaining_grace.presence AND p.incarnation = pg_postmaster_start_time()
      -- A session could lock its own key a second time, and so would find itself dead.
      AND p.session <> pg_backend_pid();
    IF NOT FOUND OR NOT (
        pg_try_advisory_xact_lock_shared(seen.advisory_key) OR (of_holder AND session_is_gone(seen.session))
    ) THEN
        RETURN NULL;
    END IF;
    IF sees_latest_commits() THEN
        SELECT p.grace, p.gone_since INTO seen
        FROM lock_presence AS p WHERE p.presence = remaining_grace.presence
        FOR UPDATE SKIP LOCKED;
    ELSE
        BEGIN
            SELECT p.grace, p.gone_since INTO seen
            FROM lock_presence AS p WHERE p.presence = remaining_grace.presence
            FOR UPDATE SKIP LOCKED;
        EXCEPTION WHEN serialization_failure THEN
            RETURN NULL;
        END;
    END IF;
    IF NOT FOUND THEN
        RETURN CASE WHEN NOT for_takeover THEN 1 END;
    END IF;
    IF seen.gone_since IS NULL THEN
        UPDATE lock_presence AS p SET gone_since = clock_timestamp() WHERE p.presence = remaining_grace.presence;
        RETURN extract(epoch FROM seen.grace);
    END IF;
    IF for_takeover AND seen.gone_since + seen.grace <= clock_timestamp() THEN
        -- Write the row instead of only locking it. A withdrawal in a transaction with an older
        -- snapshot then fails, and its client retries it.
        UPDATE lock_presence AS p SET gone_since = p.gone_since WHERE p.presence = remaining_grace.presence;
    END IF;
    RETURN extract(epoch FROM seen.gone_since + seen.grace - clock_timestamp());
END
$$;
