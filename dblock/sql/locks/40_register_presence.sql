-- Makes the calling session a presence: while the session lasts, its process counts as alive. When
-- it ends, other clients take the locks that are tied to it after `grace`, unless
-- withdraw_presence() is called before. Use a new random UUID for each session.
CREATE OR REPLACE FUNCTION register_presence(presence uuid, grace interval) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    advisory_key bigint := presence_key(register_presence.presence);
    ready boolean;
    locked boolean;
BEGIN
    IF register_presence.presence IS NULL
        OR (date_part('epoch', register_presence.grace) BETWEEN 0.01 AND 86400) IS NOT TRUE
    THEN
        -- A longer grace would overflow in sessions that check this presence, and they must not
        -- fail.
        RAISE EXCEPTION 'A presence needs a UUID and a grace of 10 ms to 24 h; got % and %.',
            coalesce(register_presence.presence::text, 'none'), coalesce(register_presence.grace::text, 'none')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    ready := commit_asynchronously();
    -- Not locked: another session has registered it, and its lock must not be waited for.
    locked := pg_try_advisory_lock(advisory_key);
    INSERT INTO lock_presence (presence, advisory_key, session, incarnation, grace)
    SELECT register_presence.presence, advisory_key, pg_backend_pid(), pg_postmaster_start_time(),
           register_presence.grace
    WHERE locked
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        PERFORM pg_advisory_unlock(advisory_key) WHERE locked;
        RAISE EXCEPTION 'Presence % is already registered. Use a new UUID for each session.', register_presence.presence
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;
