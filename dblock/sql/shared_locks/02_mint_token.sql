-- Mints a token that is above `last_token`, in the order of the grants. The caller has locked the
-- row of the lock, or of the head of a shared lock, and passes the last token of that row and the
-- server start under which it was minted. `moment` is the time of the grant. try_acquire() inlines
-- this function.
CREATE OR REPLACE FUNCTION mint_token(
    last_token bigint, INOUT minted_start timestamptz, OUT token bigint, OUT moment timestamptz
)
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    LOOP
        IF minted_start = pg_postmaster_start_time() THEN
            token := pg_catalog.nextval('token_sequence'::pg_catalog.regclass);
            -- Read after minting: if the server was frozen in between, discard the token.
            moment := clock_timestamp();
            EXIT WHEN token > last_token AND token >= date_part('epoch', moment) * 1000000 - 1000000;
        END IF;
        minted_start := catch_up_tokens(last_token, minted_start);
    END LOOP;
END
$$;
