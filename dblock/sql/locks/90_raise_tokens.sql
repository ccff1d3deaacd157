-- Makes every token from now on higher than `above`, and returns the lowest value that the next
-- token can have. Never lowers the tokens. For the owner only.
--
-- For a resource that has seen tokens which the clock of this server has not reached. Waits for no
-- grant, and no grant waits for the end of this transaction. A rollback does not undo it.
CREATE OR REPLACE FUNCTION raise_tokens(above bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    ready boolean;
BEGIN
    IF above IS NULL OR above < 0 OR above >= (1::bigint << 53) - (1::bigint << 40) THEN
        RAISE EXCEPTION 'Tokens can be raised above a number from 0 to 2^53 - 2^40; got %.', above
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    ready := commit_durably();
    PERFORM catch_up_tokens(above, NULL);
    -- Writes something in any case, so that the commit of this call waits for the disk. Another
    -- session may have raised the tokens and not have committed yet.
    PERFORM pg_catalog.setval('token_server_start'::pg_catalog.regclass, s.last_value) FROM token_server_start AS s;
    RETURN t.last_value + 1 FROM token_sequence AS t;
END
$$;
