-- Gates make a claim wait for the transactions that are writing to a table which is protected per
-- row. Each such table has an empty table of its own as the gate of all its rows, and 32 more that
-- its rows share. The lock on a gate is the lock on that table, until the end of the transaction:
--
--     a writer of a row      ROW SHARE on both gates
--     a claim of a row       ROW SHARE on the table's gate, EXCLUSIVE on the row's
--     a claim of the table   EXCLUSIVE on the table's gate
--
-- A lock on a table needs a privilege, so no role but the owner can close a gate by itself. An
-- advisory lock needs none. A weak lock on a table is also cheaper than an advisory lock, and in
-- contrast to the lock on a row it writes nothing. Rows share gates because each lock that is held
-- takes memory of all sessions, and one statement may write a million rows.

-- Returns the table to which a resource belongs, if a table of that name is protected: the part of
-- the name before the first colon, as format('%I.%I') writes it. NULL means that no table can have
-- such a name.
CREATE OR REPLACE FUNCTION table_of(resource text) RETURNS text
LANGUAGE sql IMMUTABLE
AS $$
    SELECT substring(
        resource FROM '^((?:[a-z_][a-z0-9_]*|"(?:[^"]|"")+")[.](?:[a-z_][a-z0-9_]*|"(?:[^"]|"")+"))(?::|$)'
    )
$$;

-- Returns the name of the gate of a table or a row.
CREATE OR REPLACE FUNCTION gate_of(table_resource text, resource text) RETURNS text
LANGUAGE sql IMMUTABLE
AS $$
    SELECT 'gate_' || left(md5(table_resource), 20) || CASE
        WHEN resource = table_resource THEN '' ELSE '_' || (hashtext(resource) & 31)
    END
$$;

-- Creates the gates of a table, and the function with which its guard passes them. That function
-- has one statement for each gate of rows, because a statement that is known beforehand needs no
-- parsing.
CREATE OR REPLACE FUNCTION create_gates(table_resource text) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    gate text;
    thing record;
BEGIN
    FOR gate IN
        SELECT gate_of(table_resource, table_resource) || suffix
        FROM (SELECT '' UNION ALL SELECT '_' || n FROM generate_series(0, 31) AS n) AS s (suffix)
        WHERE to_regclass(format('%I.%s%s', current_schema(), gate_of(table_resource, table_resource), suffix)) IS NULL
    LOOP
        EXECUTE format('CREATE TABLE %s ()', gate);
        FOR thing IN
            -- Privileges from ALTER DEFAULT PRIVILEGES.
            SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS grantee
            FROM pg_class AS c, aclexplode(c.relacl) AS a
            WHERE c.oid = to_regclass(format('%I.%s', current_schema(), gate)) AND a.grantee <> c.relowner
        LOOP
            EXECUTE format('REVOKE ALL ON %s FROM %s', gate, thing.grantee);
        END LOOP;
    END LOOP;
    gate := gate_of(table_resource, table_resource);
    EXECUTE format(
        'CREATE OR REPLACE FUNCTION pass_%s(number integer) RETURNS boolean LANGUAGE plpgsql VOLATILE AS %L', gate,
        'BEGIN CASE number >> 3 ' || (
            SELECT string_agg(format('WHEN %s THEN CASE number %s END CASE;', eighth, branches), ' ')
            FROM (
                SELECT n >> 3, string_agg(
                    format('WHEN %s THEN LOCK TABLE ONLY %s, ONLY %s_%s IN ROW SHARE MODE;', n, gate, gate, n), ' '
                )
                FROM generate_series(0, 31) AS n GROUP BY 1
            ) AS b (eighth, branches)
        ) || ' END CASE; RETURN true; END'
    );
    FOR thing IN
        SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS grantee
        FROM pg_proc AS p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
        WHERE p.oid = to_regprocedure(format('%I.pass_%s(integer)', current_schema(), gate)) AND a.grantee <> p.proowner
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION pass_%s(integer) FROM %s', gate, thing.grantee);
    END LOOP;
END
$$;

-- Drops what create_gates() has created.
CREATE OR REPLACE FUNCTION drop_gates(table_resource text) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    gates CONSTANT text := string_agg(gate_of(table_resource, table_resource) || suffix, ', ')
        FROM (SELECT '' UNION ALL SELECT '_' || n FROM generate_series(0, 31) AS n) AS s (suffix)
        WHERE to_regclass(format('%I.%s%s', current_schema(), gate_of(table_resource, table_resource), suffix)) IS NOT NULL;
BEGIN
    IF gates IS NOT NULL THEN
        EXECUTE 'DROP TABLE ' || gates;
        EXECUTE format('DROP FUNCTION IF EXISTS pass_%s(integer)', gate_of(table_resource, table_resource));
    END IF;
END
$$;

-- Keeps a table from being protected or unprotected until the end of the transaction. Waits for a
-- transaction that is doing so.
CREATE OR REPLACE FUNCTION hold_protection(table_resource text) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    LOOP
        PERFORM FROM fences AS f WHERE f.resource = table_resource FOR KEY SHARE;
        EXIT WHEN FOUND;
        INSERT INTO fences (resource, token, stored_at, purgeable)
        VALUES (table_resource, 0, clock_timestamp(), true)
        ON CONFLICT DO NOTHING;
    END LOOP;
END
$$;

-- Waits for the transactions that are writing a row or a table which is protected per row, and
-- blocks other writers until the end of the transaction. `gives_up` limits the wait. Without it,
-- the caller's lock_timeout does.
--
-- A lock that waits in the queue of a gate blocks all later writers. So this tries without waiting,
-- and joins the queue only for one fortieth of the time: briefly at first, then for up to 1.5 s, in
-- which Postgres detects a deadlock. For the last twenty-fifth of its time it stays in the queue.
CREATE OR REPLACE FUNCTION lock_gate(
    table_resource text, resource text, gives_up timestamptz DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    statement CONSTANT text :=
        format('LOCK TABLE ONLY %s IN EXCLUSIVE MODE', gate_of(table_resource, resource));
    lock_timeout_before CONSTANT text := current_setting('lock_timeout');
    began CONSTANT timestamptz := clock_timestamp();
    waited double precision;
    queue_at double precision := 0;
    stay_at double precision := 10;
    in_queue double precision := 0;
    ignored text;
BEGIN
    IF resource <> table_resource THEN
        EXECUTE format('LOCK TABLE ONLY %s IN ROW SHARE MODE', gate_of(table_resource, table_resource));
    END IF;
    IF gives_up IS NULL AND lock_timeout_before <> '0' THEN
        gives_up := began + lock_timeout_before::interval;
    END IF;
    IF gives_up IS NOT NULL THEN
        stay_at := date_part('epoch', gives_up - began) * 0.96;
    END IF;
    LOOP
        waited := date_part('epoch', clock_timestamp() - began);
        EXIT WHEN waited >= stay_at;
        BEGIN
            IF waited < queue_at THEN
                EXECUTE statement || ' NOWAIT';
            ELSE
                in_queue := least(greatest(waited / 40, 0.005), 1.5, stay_at - waited);
                queue_at := waited + in_queue * 40;
                ignored := set_config('lock_timeout', ceil(in_queue * 1000)::text || 'ms', true);
                EXECUTE statement;
            END IF;
            ignored := set_config('lock_timeout', lock_timeout_before, true);
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            -- This also restores lock_timeout.
            NULL;
        END;
        PERFORM pg_sleep(least(greatest(0.01, in_queue), 0.1));
    END LOOP;
    IF gives_up IS NOT NULL THEN
        ignored := set_config(
            'lock_timeout',
            greatest(round(date_part('epoch', gives_up - clock_timestamp()) * 1000), 1)::text || 'ms', true
        );
    END IF;
    EXECUTE statement;
    ignored := set_config('lock_timeout', lock_timeout_before, true);
END
$$;
