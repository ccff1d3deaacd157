-- Tokens follow the clock: their order survives events that lose tokens which a resource has seen.
--
-- A token is a number of the token sequence. The sequence counts up by one for each grant. When it
-- has fallen more than a second behind the server's clock, in microseconds since 1970, it is moved
-- up to the clock first. So a token lies at most one second behind the clock of its grant, and not
-- ahead of it (at fewer than a million grants per second). A server whose sequence went back (a
-- promoted standby, a restored backup, a frozen primary that returns) needs no record of what it
-- lost: its clock has moved past the lost tokens, and its first token is at the clock.
--
-- The first grant after a start of the server moves the sequence up to the clock even if it is less
-- than a second behind, because a failover may take less than a second.
--
-- The clock decides only how far the sequence moves up. The sequence never goes back, so on one
-- server the order of tokens holds whatever the clock does.

-- Moves the tokens up, if necessary: to the server's clock, and above `above`. Returns the start of
-- this server, to be recorded in the row of the lock. `minted_start` is the start that is recorded
-- there.
--
-- Nothing but this function sets the sequence. Sessions take turns by a lock of the table
-- token_clock. Without it, a session that is delayed before `setval` would set the sequence back to
-- its own older value. The lock must not last until the end of the caller's transaction, because a
-- caller who stays idle there would stop all grants. So the lock is taken in a subtransaction that
-- is rolled back. `setval` is not transactional and stays. The WAL record of `setval` precedes the
-- commit of the grant, so a durable grant makes it durable too.
--
-- `nextval` does not wait for that lock. A grant between the two statements that read and set the
-- sequence cannot get a token above the new value. Either no session grants at that moment (until
-- token_server_start has the start of this server), or the new value is a million above the old one
-- at least, and more than a million grants would have to come between the two statements.
CREATE OR REPLACE FUNCTION catch_up_tokens(above bigint, minted_start timestamptz) RETURNS timestamptz
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    second CONSTANT bigint := 1000000;
    server_start CONSTANT bigint := date_part('epoch', pg_postmaster_start_time()) * second;
    started boolean;
    highest bigint;
    clock bigint;
    target bigint;
    ignored text;
BEGIN
    IF minted_start = pg_postmaster_start_time() THEN
        -- The caller has found the tokens too low, and need not look again.
        started := true;
    ELSE
        -- If only the row is new, or older than the server, the tokens are as they should be.
        SELECT t.last_value, s.last_value = server_start INTO highest, started
        FROM token_sequence AS t, token_server_start AS s;
        IF started AND highest > above AND highest >= date_part('epoch', clock_timestamp()) * second - second THEN
            RETURN pg_postmaster_start_time();
        END IF;
    END IF;
    BEGIN
        IF current_setting('lock_timeout') = '0' THEN
            ignored := set_config('lock_timeout', '2s', true);
        END IF;
        LOCK TABLE token_clock IN SHARE UPDATE EXCLUSIVE MODE;
        -- As expressions, because a query costs more.
        highest := coalesce(pg_sequence_last_value('token_sequence'::regclass), 0);
        started := started OR coalesce(pg_sequence_last_value('token_server_start'::regclass) = server_start, false);
        clock := date_part('epoch', clock_timestamp()) * second;
        IF highest < clock - second OR (highest < clock AND NOT started) THEN
            target := clock;
        ELSIF NOT started THEN
            -- The clock is behind the tokens, so it cannot show how many were lost.
            target := highest + second;
        ELSE
            target := highest;
        END IF;
        IF above >= target THEN
            target := greatest(above, highest + second);
        END IF;
        IF target > highest THEN
            IF target >= 1::bigint << 53 THEN
                RAISE EXCEPTION 'No token can be minted: the next one would be %, and tokens end at 2^53.', target
                    USING HINT = 'Check the clock of the server, and whether tokens were raised too far.';
            END IF;
            target := pg_catalog.setval('token_sequence'::pg_catalog.regclass, target);
        END IF;
        -- After the tokens, because a session that finds this start grants.
        IF NOT started THEN
            PERFORM pg_catalog.setval('token_server_start'::pg_catalog.regclass, server_start);
        END IF;
        RAISE EXCEPTION USING ERRCODE = 'DBL00';
    EXCEPTION
        WHEN SQLSTATE 'DBL00' THEN
            RETURN pg_postmaster_start_time();
        WHEN lock_not_available THEN
            RAISE EXCEPTION 'No token can be minted: another session has locked table token_clock for too long.'
                USING ERRCODE = 'lock_not_available',
                      HINT = 'Find the session in pg_locks. If it is stuck, end it with pg_terminate_backend().';
    END;
END
$$;
