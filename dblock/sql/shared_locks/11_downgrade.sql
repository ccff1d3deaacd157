-- Turns the grant of a writer into a grant of a reader, in one transaction: no other writer is
-- granted the lock in between. `name` is the read-write lock or the writer's share of it, and
-- `token` the writer's token. The reply has the new token and the reader's share. The holder and
-- the meta stay, and without a `ttl` so does the ttl.
--
-- `granted` is false if the token does not hold the lock any more, or if its holder was told to
-- release. It is NULL if another transaction keeps the lock or the writer's share locked (for
-- example one that has proved the writer's lease): ask again a little later. A retry with the same
-- `attempt` after a lost reply finds the grant that was made.
--
-- The commit is durable, so no waiter is notified here. Call wake_queue() afterwards in its own
-- transaction. Otherwise waiting readers find out by themselves, within a second.
CREATE OR REPLACE FUNCTION downgrade(
    name text,
    INOUT token bigint,
    attempt uuid DEFAULT NULL,
    ttl interval DEFAULT NULL,
    presence uuid DEFAULT NULL,
    OUT granted boolean,
    OUT expires_at timestamptz,
    OUT remaining double precision,
    OUT share text,
    OUT permit integer
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := check_request(downgrade.name, coalesce(downgrade.ttl, '30 seconds'));
    lock_name text := coalesce(
        (SELECT l.head FROM distributed_locks AS l WHERE l.name = downgrade.name AND l.kind = 'writer'), downgrade.name
    );
    old_token CONSTANT bigint := downgrade.token;
    writer record;
    mine record;
BEGIN
    token := NULL;
    IF NOT lock_head(lock_name, 20) THEN
        granted := CASE WHEN NOT EXISTS (SELECT FROM distributed_locks AS l WHERE l.name = lock_name) THEN false END;
        RETURN;
    END IF;
    IF NOT EXISTS (SELECT FROM distributed_locks AS l WHERE l.name = lock_name AND l.kind = 'read-write') THEN
        ready := refuse_kind(lock_name, 'a read-write lock');
    END IF;
    IF downgrade.attempt IS NOT NULL THEN
        SELECT s.name, s.token, s.expires_at, s.permit INTO mine
        FROM distributed_locks AS s
        WHERE s.head = lock_name AND s.kind = 'reader' AND s.attempt = downgrade.attempt
          AND s.expires_at > clock_timestamp();
        IF FOUND THEN
            -- As in acquire_shared().
            ready := commit_durably();
            UPDATE distributed_locks AS s SET attempt = s.attempt WHERE s.name = mine.name AND s.token = mine.token;
            granted := true;
            token := mine.token;
            expires_at := mine.expires_at;
            remaining := greatest(date_part('epoch', mine.expires_at) - date_part('epoch', clock_timestamp()), 0);
            share := mine.name;
            permit := mine.permit;
            RETURN;
        END IF;
    END IF;
    granted := false;
    SELECT s.name, s.token, s.holder, s.meta, s.ttl, s.presence INTO writer
    FROM distributed_locks AS s
    WHERE s.name = share_name(lock_name, 'writer', NULL) AND s.head = lock_name AND s.token = old_token
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        IF EXISTS (
            SELECT FROM distributed_locks AS s
            WHERE s.name = share_name(lock_name, 'writer', NULL) AND s.token = old_token AND s.expires_at > clock_timestamp()
        ) THEN
            granted := NULL;
        END IF;
        RETURN;
    END IF;
    -- The row is locked before the clock is read, so an expired lease is not downgraded.
    IF NOT EXISTS (
        SELECT FROM distributed_locks AS s
        WHERE s.name = writer.name AND s.token = old_token AND s.expires_at > clock_timestamp()
          AND s.forced_at IS NULL
    ) THEN
        RETURN;
    END IF;
    permit := lowest_free_share(lock_name, 'reader', 2147483647);
    share := take_share(lock_name, 'reader', permit);
    IF share IS NULL THEN
        granted := NULL;
        permit := NULL;
        RETURN;
    END IF;
    PERFORM free_lock(writer.name);
    SELECT g.token, g.expires_at INTO token, expires_at
    FROM grant_share(
        lock_name, share, coalesce(make_interval(secs => date_part('epoch', downgrade.ttl)), writer.ttl), writer.holder,
        writer.meta, downgrade.attempt, coalesce(downgrade.presence, writer.presence)
    ) AS g;
    granted := true;
    remaining := date_part('epoch', coalesce(downgrade.ttl, writer.ttl));
END
$$;
