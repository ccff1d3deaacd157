-- Checks the names that acquire_all() and acquire_any() share, and finds out whether a caller that
-- waits should give up some of the locks that it holds.

-- Refuses an array of names that is missing, has a NULL or has the same name twice. `sorted` also
-- refuses names that are not in the order of their bytes: callers that take locks in one common
-- order cannot wait for each other in a cycle.
CREATE OR REPLACE FUNCTION check_names(names text[], sorted boolean) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    IF names IS NULL OR array_position(names, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'The names of several locks are an array without NULL.'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (SELECT count(DISTINCT n.name COLLATE "C") FROM unnest(names) AS n (name)) < cardinality(names) THEN
        RAISE EXCEPTION 'The names of several locks must differ.' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF sorted AND names <> ARRAY(SELECT n.name FROM unnest(names) AS n (name) ORDER BY n.name COLLATE "C") THEN
        RAISE EXCEPTION 'The names of several locks must be sorted by their bytes, as with COLLATE "C".'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN true;
END
$$;

-- Returns the first of the UUIDs whose first eight bytes are those of this attempt, or with `last`
-- the last of them. Attempts of one thread or task have the same first eight bytes.
CREATE OR REPLACE FUNCTION owner_bound(attempt uuid, last boolean) RETURNS uuid
LANGUAGE sql IMMUTABLE
AS $$
    SELECT (left(owner_bound.attempt::text, 18)
            || CASE WHEN owner_bound.last THEN '-ffff-ffffffffffff' ELSE '-0000-000000000000' END)::uuid
$$;

-- Returns the lock that an attempt should give up because it waits for a lock of this name: one
-- that its thread or task holds, at the end of a cycle of waiters. `waiter` is the attempt that
-- waits for it. NULL: there is no such cycle.
--
-- The holder of each lock on the way waits for the next one. A holder that waits for any of several
-- locks waits for none of them in particular, and ends the search.
CREATE OR REPLACE FUNCTION lock_in_cycle(name text, attempt uuid, OUT lock text, OUT waiter uuid)
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    at text := lock_in_cycle.name;
    passed text[] := '{}';
    other uuid;
    next record;
BEGIN
    LOOP
        SELECT l.attempt INTO other FROM distributed_locks AS l
        WHERE l.name = at AND l.expires_at > clock_timestamp();
        EXIT WHEN other IS NULL OR at = ANY (passed);
        IF owner_bound(other, false) = owner_bound(lock_in_cycle.attempt, false) THEN
            IF passed <> '{}' THEN
                lock := at;
                waiter := next.attempt;
            END IF;
            EXIT;
        END IF;
        SELECT * INTO next FROM wait_of(other);
        EXIT WHEN next.name IS NULL;
        passed := passed || at;
        at := next.name;
    END LOOP;
END
$$;

-- Returns the one lock for which the thread or task of a holder, given by its attempt, waits, and
-- the attempt that waits. NULL: it does not wait, or it waits for any of several locks.
CREATE OR REPLACE FUNCTION wait_of(held_by uuid, OUT name text, OUT attempt uuid, OUT client uuid)
LANGUAGE sql STABLE
AS $$
    SELECT min(t.name), (array_agg(t.attempt))[1], (array_agg(t.client))[1]
    FROM lock_tickets AS t JOIN lock_clients AS c ON c.client = t.client AND c.seen_until > clock_timestamp()
    WHERE t.attempt
          BETWEEN owner_bound(wait_of.held_by, false) AND owner_bound(wait_of.held_by, true)
    HAVING count(*) = 1
$$;

-- Returns the position (from 1) of the first of these locks for which another attempt waits that
-- may hold other locks. NULL: there is none. A ticket that is marked as `ordered` does not count:
-- its waiter holds only locks whose names come before, so it alone closes no cycle.
CREATE OR REPLACE FUNCTION first_wanted(names text[], attempt uuid) RETURNS integer
LANGUAGE sql STABLE
AS $$
    SELECT min(h.position)::integer
    FROM unnest(first_wanted.names) WITH ORDINALITY AS h (name, position)
    WHERE EXISTS (
        SELECT FROM lock_tickets AS t JOIN lock_clients AS c ON c.client = t.client
        WHERE t.name = h.name AND t.attempt <> first_wanted.attempt AND NOT t.ordered
          AND c.seen_until > clock_timestamp()
    )
$$;
