-- Lets a party wait at a barrier, and trips the barrier if the party is the last one. Call it again
-- with the same `attempt` when a notification arrives on the client's channel, and after a lost
-- reply: an attempt whose generation has tripped finds its number. See docs/reference/sql.md.
--
-- The first arrival creates the barrier. `client` identifies the waiting process, which must call
-- heartbeat() every second. If it does not, or if its presence ends, the party does not count.
--
-- A trip commits durably, and so must not notify. With `wake`, call wake_waiters() in its own
-- transaction. `next_check` has the seconds after which to ask again, if only a party whose
-- presence is in doubt is missing.
CREATE OR REPLACE FUNCTION arrive_barrier(
    name text,
    parties integer,
    attempt uuid,
    client uuid,
    holder text DEFAULT NULL,
    presence uuid DEFAULT NULL,
    OUT tripped boolean,
    OUT number integer,
    OUT generation bigint,
    OUT wake boolean,
    OUT fresh boolean,
    OUT next_check double precision
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := check_barrier('barrier', name, parties);
    alone CONSTANT boolean := pg_current_xact_id_if_assigned() IS NULL;
    seen record;
    trip record;
    has_tripped boolean := false;
BEGIN
    IF attempt IS NULL OR client IS NULL THEN
        RAISE EXCEPTION 'arrive_barrier needs an attempt and a client to wait at barrier %.', quote_literal(name)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    ready := check_request(arrive_barrier.name, '1 s', arrive_barrier.holder);
    LOOP
        SELECT b.parties, b.arrivals INTO seen FROM barriers AS b WHERE b.name = arrive_barrier.name FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO barriers (name, parties, used_at)
        VALUES (arrive_barrier.name, arrive_barrier.parties, clock_timestamp())
        ON CONFLICT DO NOTHING;
    END LOOP;
    ready := check_same_size('barrier', arrive_barrier.name, seen.parties, arrive_barrier.parties);
    wake := false;
    fresh := false;
    tripped := false;
    SELECT p.number, p.generation INTO number, generation
    FROM barrier_passes AS p WHERE p.attempt = arrive_barrier.attempt AND p.name = arrive_barrier.name;
    IF NOT FOUND THEN
        fresh := register_waiter(
            'barrier', arrive_barrier.name, seen.arrivals + 1, arrive_barrier.attempt, arrive_barrier.client,
            arrive_barrier.holder, arrive_barrier.presence
        );
        -- Checked after the registration, because another call may have given the pass until then.
        -- A second pass of this attempt would fail, and with it the trip of all parties.
        IF EXISTS (SELECT FROM barrier_passes AS p WHERE p.attempt = arrive_barrier.attempt) THEN
            RAISE EXCEPTION 'Attempt % has passed another barrier. Use a new UUID for each wait at barrier %.',
                arrive_barrier.attempt, quote_literal(name)
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        IF fresh THEN
            UPDATE barriers AS b SET arrivals = b.arrivals + 1, used_at = clock_timestamp()
            WHERE b.name = arrive_barrier.name;
        END IF;
        trip := trip_barrier(arrive_barrier.name, arrive_barrier.parties);
        next_check := trip.next_check;
        has_tripped := trip.tripped;
        IF has_tripped THEN
            ready := commit_durably();
            wake := arrive_barrier.parties > 1;
            SELECT p.number, p.generation INTO number, generation
            FROM barrier_passes AS p WHERE p.attempt = arrive_barrier.attempt AND p.name = arrive_barrier.name;
        END IF;
    END IF;
    IF number IS NOT NULL THEN
        tripped := true;
        DELETE FROM barrier_waiters AS w WHERE w.attempt = arrive_barrier.attempt;
    END IF;
    IF alone AND NOT has_tripped THEN
        -- A lost arrival only costs another one.
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
END
$$;
