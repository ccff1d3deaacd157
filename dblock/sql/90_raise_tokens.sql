-- Makes every token from now on higher than `above`, and returns the lowest value that the next
-- token can have. Never lowers the tokens.
--
-- For events that keep the timeline and may still lose tokens: a dump restored elsewhere, a logical
-- switchover. The sequence is locked against `nextval` before it is read, so a concurrent grant
-- cannot be overtaken. For the owner only.
CREATE OR REPLACE FUNCTION raise_tokens(above bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    ready boolean;
    lowest bigint;
BEGIN
    IF above IS NULL OR above < 0 OR above >= 9223372036854775807 - (1::bigint << 40) THEN
        RAISE EXCEPTION 'Tokens can be raised above a number from 0 to 2^63 - 2^40; got %.', above
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    ready := commit_durably();
    -- Lock the record before the sequence, in the order of enter_timeline().
    PERFORM 1 FROM token_timeline FOR UPDATE;
    -- Changes nothing, and locks the sequence until the end of the transaction.
    ALTER SEQUENCE token_sequence NO CYCLE;
    SELECT greatest(CASE WHEN is_called THEN last_value + 1 ELSE last_value END, above + 1)
    INTO lowest FROM token_sequence;
    EXECUTE format('ALTER SEQUENCE token_sequence RESTART WITH %s', lowest);
    RETURN lowest;
END
$$;
