-- The shares of a shared lock: which are held, and which row the next grant takes.

-- Returns how many shares of these kinds are held, the deadline that comes first, and whether a
-- holder has a presence. `next_check` is the seconds until one of them may be free (0: none is
-- held).
--
-- With `look`, a holder whose presence is gone counts until its grace is over. With `takeover`,
-- such a holder holds nothing after that: its shares are freed. The caller has locked the head
-- then.
CREATE OR REPLACE FUNCTION look_at_shares(
    head text, kinds text[], look boolean, takeover boolean,
    OUT held integer, OUT expires_at timestamptz, OUT next_check double precision, OUT watched boolean
)
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    seen record;
    dead record;
    grace double precision;
    shortest double precision;
    freed boolean := false;
BEGIN
    LOOP
        SELECT count(*), min(s.expires_at), coalesce(bool_or(s.presence IS NOT NULL), false)
        INTO held, expires_at, watched
        FROM distributed_locks AS s
        WHERE s.head = look_at_shares.head AND s.kind = ANY (look_at_shares.kinds)
          AND s.expires_at > clock_timestamp();
        EXIT WHEN NOT watched OR freed OR NOT (look OR takeover);
        -- Each presence once, however many shares are tied to it.
        FOR seen IN
            SELECT DISTINCT s.presence
            FROM distributed_locks AS s
            WHERE s.head = look_at_shares.head AND s.kind = ANY (look_at_shares.kinds)
              AND s.expires_at > clock_timestamp() AND s.presence IS NOT NULL
        LOOP
            grace := remaining_grace(seen.presence, takeover, true);
            IF grace <= 0 AND takeover THEN
                FOR dead IN
                    SELECT s.name, s.token
                    FROM distributed_locks AS s
                    WHERE s.head = look_at_shares.head AND s.kind = ANY (look_at_shares.kinds)
                      AND s.expires_at > clock_timestamp() AND s.presence = seen.presence
                LOOP
                    IF free_dead_holder(dead.name, dead.token, seen.presence) THEN
                        freed := true;
                    END IF;
                END LOOP;
            ELSE
                shortest := least(shortest, grace);
            END IF;
        END LOOP;
        EXIT WHEN NOT freed;
    END LOOP;
    -- Subtract numbers: Postgres before 17 cannot subtract from an infinite timestamp.
    next_check := CASE WHEN held > 0 THEN greatest(
        least(date_part('epoch', expires_at) - date_part('epoch', clock_timestamp()), shortest), 0
    ) ELSE 0 END;
END
$$;

-- Returns the name of a share.
CREATE OR REPLACE FUNCTION share_name(head text, kind text, number integer) RETURNS text
LANGUAGE sql IMMUTABLE
AS $$
    SELECT head || '#' || CASE kind WHEN 'writer' THEN 'writer' WHEN 'reader' THEN 'reader-' || number ELSE number::text END
$$;

-- Locks the shares of a kind that are not held, and returns how many of them stay locked by other
-- transactions or have turned out to be held. Waits for no row. The caller has locked the head.
CREATE OR REPLACE FUNCTION lock_free_shares(head text, kinds text[]) RETURNS integer
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    locked integer := 0;
BEGIN
    PERFORM 1 FROM distributed_locks AS s
    WHERE s.head = lock_free_shares.head AND s.kind = ANY (lock_free_shares.kinds) AND s.expires_at <= clock_timestamp()
    FOR UPDATE SKIP LOCKED;
    GET DIAGNOSTICS locked = ROW_COUNT;
    -- Counted after the rows are locked: the reaper may delete some before that, but no session
    -- adds one.
    RETURN (
        SELECT count(*) FROM distributed_locks AS s
        WHERE s.head = lock_free_shares.head AND s.kind = ANY (lock_free_shares.kinds)
    ) - locked;
END
$$;

-- Returns the number of the lowest share that is free and locks its row, or the lowest number
-- without a row. NULL means that there is none below `below`, or that other transactions have
-- locked the free ones.
CREATE OR REPLACE FUNCTION lowest_free_share(head text, kind text, below integer) RETURNS integer
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    found_number integer;
    seen record;
BEGIN
    SELECT s.permit INTO found_number FROM distributed_locks AS s
    WHERE s.head = lowest_free_share.head AND s.kind = lowest_free_share.kind
      AND s.permit < lowest_free_share.below AND s.expires_at <= clock_timestamp()
    ORDER BY s.permit
    LIMIT 1
    FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        RETURN found_number;
    END IF;
    SELECT count(*) AS rows, coalesce(max(s.permit), -1) AS highest INTO seen FROM distributed_locks AS s
    WHERE s.head = lowest_free_share.head AND s.kind = lowest_free_share.kind AND s.permit < lowest_free_share.below;
    IF seen.rows > seen.highest THEN
        found_number := seen.highest + 1;
    ELSE
        -- The reaper has deleted a row in between.
        SELECT min(n) INTO found_number FROM generate_series(0, seen.highest) AS n
        WHERE NOT EXISTS (
            SELECT FROM distributed_locks AS s
            WHERE s.head = lowest_free_share.head AND s.kind = lowest_free_share.kind AND s.permit = n
        );
    END IF;
    RETURN CASE WHEN found_number < lowest_free_share.below THEN found_number END;
END
$$;

-- Locks the row of a share, which is free, and creates it if there is none. Returns the share's
-- name, or NULL if another transaction has locked the row. Refuses a name that is another lock.
CREATE OR REPLACE FUNCTION take_share(head text, kind text, number integer) RETURNS text
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    share CONSTANT text := share_name(take_share.head, take_share.kind, take_share.number);
    patience text := current_setting('lock_timeout');
    seen record;
    ignored text;
BEGIN
    LOOP
        SELECT s.kind, s.head, s.expires_at <= clock_timestamp() AS free INTO seen
        FROM distributed_locks AS s WHERE s.name = share
        FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            IF seen.kind IS NOT DISTINCT FROM take_share.kind AND seen.head IS NOT DISTINCT FROM take_share.head THEN
                RETURN CASE WHEN seen.free THEN share END;
            END IF;
            IF is_unused(share) THEN
                UPDATE distributed_locks AS s
                SET kind = take_share.kind, head = take_share.head, permit = take_share.number, waiting = false
                WHERE s.name = share;
                RETURN share;
            END IF;
        END IF;
        SELECT s.kind, s.head INTO seen FROM distributed_locks AS s WHERE s.name = share;
        IF FOUND THEN
            IF seen.kind IS DISTINCT FROM take_share.kind OR seen.head IS DISTINCT FROM take_share.head THEN
                PERFORM refuse_kind(
                    share,
                    describe_kind(take_share.kind, take_share.head)
                );
            END IF;
            RETURN NULL;
        END IF;
        BEGIN
            ignored := set_config('lock_timeout', '20ms', true);
            INSERT INTO distributed_locks (name, token, expires_at, kind, head, permit)
            VALUES (share, 0, '-infinity', take_share.kind, take_share.head, take_share.number)
            ON CONFLICT DO NOTHING;
            ignored := set_config('lock_timeout', patience, true);
        EXCEPTION WHEN lock_not_available THEN
            RETURN NULL;
        END;
    END LOOP;
END
$$;

-- Grants a share: mints the token, and writes the grant to the share's row and the token to the
-- head's row. The caller has locked both and checked that the share may be granted.
CREATE OR REPLACE FUNCTION grant_share(
    head text, share text, lease_time interval, holder text, meta jsonb, attempt uuid, presence uuid,
    OUT token bigint, OUT expires_at timestamptz
)
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_durably();
    last record;
    minted record;
BEGIN
    IF EXISTS (SELECT FROM distributed_locks AS s WHERE s.name = grant_share.share AND s.expires_at > '-infinity') THEN
        PERFORM record_grant_end(grant_share.share, 'expired');
    END IF;
    SELECT l.token, l.minted_server_start INTO last FROM distributed_locks AS l WHERE l.name = grant_share.head;
    minted := mint_token(last.token, last.minted_server_start);
    UPDATE distributed_locks AS l
    SET token = minted.token, minted_server_start = minted.minted_start, released_at = minted.moment
    WHERE l.name = grant_share.head;
    UPDATE distributed_locks AS s
    SET token = minted.token,
        minted_server_start = minted.minted_start,
        attempt = grant_share.attempt,
        holder = grant_share.holder,
        meta = grant_share.meta,
        presence = grant_share.presence,
        granted_at = minted.moment,
        released_at = NULL,
        forced_at = NULL,
        ttl = grant_share.lease_time,
        expires_at = minted.moment + grant_share.lease_time
    WHERE s.name = grant_share.share
    RETURNING s.token, s.expires_at INTO token, expires_at;
END
$$;
