-- Barriers and latches: what their functions share.
--
-- A barrier trips when as many parties wait at it as it has, and a latch opens when it was counted
-- down as often as its count says. Both decisions are durable: a party that was told of a trip has
-- continued, so a crash must not make the others wait for it again. The tables barriers,
-- barrier_passes, latches and latch_counts are therefore logged, and the transaction that trips or
-- opens commits durably.
--
-- Who waits at this moment (barrier_waiters) is unlogged, because it means nothing after a crash or
-- a failover. The table is empty then, the heartbeat of each client finds its rows missing, and its
-- parties ask again under the same attempts. A party of a generation that has tripped finds its
-- pass.
--
-- Every arrival, departure and trip of one barrier locks the barrier's row, so they are serial.
-- Lock order: the row of the barrier or latch, then rows of barrier_waiters, then lock_clients.
-- leave_queue() and abandon() delete rows of barrier_waiters without the barrier's row. So a trip
-- skips a waiter whose row is locked: it is leaving.

-- Refuses arguments outside the documented limits. `size` is the number of parties, or the count of
-- a latch.
CREATE OR REPLACE FUNCTION check_barrier(kind text, name text, size integer) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE
AS $$
DECLARE
    most CONSTANT integer := CASE kind WHEN 'barrier' THEN 10000 ELSE 1000000000 END;
BEGIN
    IF name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 512 THEN
        RAISE EXCEPTION 'A %''s name takes 1 to 512 bytes; this one has %.', kind, coalesce(octet_length(name), 0)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (size BETWEEN 1 AND most) IS NOT TRUE THEN
        RAISE EXCEPTION 'The % of % % is from 1 to %; got %.',
            CASE kind WHEN 'barrier' THEN 'number of parties' ELSE 'count' END, kind, quote_literal(name), most,
            coalesce(size::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN true;
END
$$;

-- Refuses a client that gives another number of parties, or another count, than the first one gave.
CREATE OR REPLACE FUNCTION check_same_size(kind text, name text, size integer, asked integer) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    IF size <> asked THEN
        RAISE EXCEPTION '% % has %, and this client gave %.',
            initcap(kind), quote_literal(name),
            CASE kind WHEN 'barrier' THEN size || ' parties' ELSE 'a count of ' || size END, asked
            USING ERRCODE = 'DBL12',
                  DETAIL = json_build_object('kind', kind, 'name', name, 'size', size, 'asked', asked)::text,
                  HINT = 'Give the same number everywhere, or delete it with: dblock barriers delete';
    END IF;
    RETURN true;
END
$$;

-- Registers an attempt that waits at a barrier or a latch, or adds a presence to it that was
-- registered later. Returns whether the attempt is new there. The caller has locked the row of the
-- barrier or latch. `number` is the attempt's place in the order of arrival.
CREATE OR REPLACE FUNCTION register_waiter(
    kind text, name text, number bigint, attempt uuid, client uuid, holder text, presence uuid
) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    is_new boolean;
BEGIN
    UPDATE barrier_waiters AS w SET presence = coalesce(register_waiter.presence, w.presence)
    WHERE w.attempt = register_waiter.attempt AND w.kind = register_waiter.kind AND w.name = register_waiter.name;
    is_new := NOT FOUND;
    IF is_new THEN
        INSERT INTO barrier_waiters (attempt, kind, name, number, client, presence, holder, since)
        VALUES (register_waiter.attempt, register_waiter.kind, register_waiter.name, register_waiter.number,
                register_waiter.client, register_waiter.presence,
                coalesce(register_waiter.holder, describe_session()), clock_timestamp())
        ON CONFLICT (attempt) DO NOTHING;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'Attempt % waits at another barrier or latch. Use a new UUID for each wait at % %.',
                register_waiter.attempt, register_waiter.kind, quote_literal(register_waiter.name)
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
    END IF;
    PERFORM touch_client(register_waiter.client);
    RETURN is_new;
END
$$;

-- Trips a barrier as often as enough live parties wait at it: gives each party of a generation its
-- pass, with its number in the order of arrival. The caller has locked the barrier's row.
--
-- A party counts if its client has sent a heartbeat within three seconds and its presence, if it
-- has one, has not ended. The row of a party whose client is dead is deleted. A party whose
-- presence has ended, but still has grace left, is neither counted nor deleted. If it could make
-- the barrier trip, `next_check` has the seconds after which the caller should ask again.
CREATE OR REPLACE FUNCTION trip_barrier(
    name text, parties integer, OUT tripped boolean, OUT next_check double precision
)
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    seen record;
    grace double precision;
    -- The attempts that count, in the order of arrival, and how many rows may come to count.
    present uuid[] := '{}';
    possible bigint;
    -- The presences that this call has checked.
    alive uuid[] := '{}';
    away uuid[] := '{}';
    gone uuid[] := '{}';
    dead uuid[] := '{}';
    reached bigint;
    given bigint;
BEGIN
    tripped := false;
    SELECT count(*) INTO possible FROM barrier_waiters AS w
    WHERE w.kind = 'barrier' AND w.name = trip_barrier.name AND NOT w.over;
    IF possible < parties THEN
        RETURN;
    END IF;
    FOR seen IN
        SELECT w.attempt, w.presence, c.seen_until
        FROM barrier_waiters AS w LEFT JOIN lock_clients AS c ON c.client = w.client
        WHERE w.kind = 'barrier' AND w.name = trip_barrier.name AND NOT w.over
        ORDER BY w.number
        FOR UPDATE OF w SKIP LOCKED
    LOOP
        IF (seen.seen_until > clock_timestamp()) IS NOT TRUE AND snapshot_is_fresh() THEN
            dead := dead || seen.attempt;
            CONTINUE;
        END IF;
        IF seen.presence IS NOT NULL AND (seen.presence = ANY (alive || away || gone)) IS NOT TRUE THEN
            grace := remaining_grace(seen.presence, false, false);
            IF grace IS NULL THEN
                alive := alive || seen.presence;
            ELSIF grace > 0 THEN
                away := away || seen.presence;
                next_check := least(next_check, grace);
            ELSE
                gone := gone || seen.presence;
            END IF;
        END IF;
        IF seen.presence = ANY (gone) THEN
            dead := dead || seen.attempt;
        ELSIF seen.presence IS NULL OR seen.presence = ANY (alive) THEN
            present := present || seen.attempt;
        END IF;
    END LOOP;
    DELETE FROM barrier_waiters AS w WHERE w.attempt = ANY (dead);
    IF possible - cardinality(dead) < parties THEN
        next_check := NULL;
        RETURN;
    END IF;
    WHILE cardinality(present) >= parties LOOP
        tripped := true;
        UPDATE barriers AS b SET generation = b.generation + 1, used_at = clock_timestamp()
        WHERE b.name = trip_barrier.name
        RETURNING b.generation INTO reached;
        INSERT INTO barrier_passes (attempt, name, generation, number, tripped_at)
        SELECT p.attempt, trip_barrier.name, reached, p.place - 1, clock_timestamp()
        FROM unnest(present[1:parties]) WITH ORDINALITY AS p (attempt, place)
        -- In REPEATABLE READ an attempt may have passed another barrier since the snapshot. Then
        -- this raises serialization_failure, as a plain INSERT would not.
        ON CONFLICT (attempt) DO NOTHING;
        GET DIAGNOSTICS given = ROW_COUNT;
        IF given < parties THEN
            RAISE EXCEPTION 'An attempt at barrier % has passed another barrier. Use a new UUID for each wait.',
                quote_literal(name)
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        UPDATE barrier_waiters AS w SET over = true WHERE w.attempt = ANY (present[1:parties]);
        present := present[parties + 1:];
    END LOOP;
    IF tripped THEN
        next_check := NULL;
        -- A pass serves a party that has not asked again since the trip, or whose reply was lost.
        -- The newest hundred generations stay, and those of the last minute.
        DELETE FROM barrier_passes AS p
        WHERE p.name = trip_barrier.name AND p.generation <= reached - 100
          AND p.tripped_at <= clock_timestamp() - interval '1 minute'
          AND NOT EXISTS (SELECT FROM barrier_waiters AS w WHERE w.attempt = p.attempt);
    ELSE
        -- A row that is locked, or a presence that has ended just now.
        next_check := coalesce(next_check, 0.05);
    END IF;
END
$$;

-- Deletes barriers that have not been used for longer than `idle` and at which no party waits, and
-- latches that have not been counted down for longer than 30 days. Waits for no row.
CREATE OR REPLACE FUNCTION reap_barriers(idle interval, batch integer) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
BEGIN
    DELETE FROM barrier_waiters AS w
    WHERE w.attempt = ANY (ARRAY(
        SELECT o.attempt FROM barrier_waiters AS o
        WHERE o.since <= clock_timestamp() - idle AND NOT EXISTS (
            SELECT FROM lock_clients AS c WHERE c.client = o.client AND c.seen_until > clock_timestamp() - idle
        )
        FOR UPDATE SKIP LOCKED
    ));
    WITH old AS (
        DELETE FROM barriers AS b
        WHERE b.name = ANY (ARRAY(
            SELECT o.name FROM barriers AS o
            WHERE o.used_at <= clock_timestamp() - greatest(idle, '1 minute')
              AND NOT EXISTS (SELECT FROM barrier_waiters AS w WHERE w.kind = 'barrier' AND w.name = o.name)
            LIMIT batch
            FOR UPDATE SKIP LOCKED
        ))
        RETURNING b.name
    )
    DELETE FROM barrier_passes AS p USING old WHERE p.name = old.name;
    WITH old AS (
        DELETE FROM latches AS b
        WHERE b.name = ANY (ARRAY(
            SELECT o.name FROM latches AS o
            WHERE o.used_at <= clock_timestamp() - greatest(idle, '30 days')
              AND NOT EXISTS (SELECT FROM barrier_waiters AS w WHERE w.kind = 'latch' AND w.name = o.name)
            LIMIT batch
            FOR UPDATE SKIP LOCKED
        ))
        RETURNING b.name
    )
    DELETE FROM latch_counts AS c USING old WHERE c.name = old.name;
END
$$;
