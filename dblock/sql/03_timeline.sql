-- The server's timeline, on which the order of tokens depends after a failover or restore.

-- Returns the server's timeline, which is the first part of a WAL file's name. Any role may read
-- it, and it is correct from the moment of a promotion.
CREATE OR REPLACE FUNCTION current_timeline() RETURNS bigint
LANGUAGE sql VOLATILE
AS $$
    SELECT ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint
$$;

-- Moves the tokens far ahead, once, when the server is on another timeline than the one on which
-- tokens were last minted.
--
-- A promotion or a point-in-time recovery may lose tokens that a resource has already seen. The
-- sequence is then behind and would issue the same tokens again. Every such event changes the
-- timeline (and so does pg_upgrade, back to 1). Each session that is about to mint on a timeline
-- other than the recorded one calls this first. Sessions that call it at the same time wait for the
-- record's row.
CREATE OR REPLACE FUNCTION enter_timeline() RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    recorded bigint;
BEGIN
    SELECT timeline INTO STRICT recorded FROM token_timeline FOR UPDATE;
    IF recorded <> current_timeline() THEN
        -- No session mints while this one holds the record, so the sequence stands still. The new
        -- value is also above the range of every earlier timeline, because a recovery may go back
        -- past an earlier jump.
        PERFORM pg_catalog.setval(
            'token_sequence'::pg_catalog.regclass,
            greatest(last_value + (1::bigint << 40), (current_timeline() - 1) << 40)
        ) FROM token_sequence;
        UPDATE token_timeline SET timeline = current_timeline();
    END IF;
END
$$;
