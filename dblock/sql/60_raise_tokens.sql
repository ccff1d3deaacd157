-- Makes every token from now on higher than `above`, and returns what the next one will be at least. Never lowers them.
--
-- For what keeps the timeline and may still have lost tokens: a dump restored elsewhere, a logical switchover.
-- The sequence is locked against `nextval` before it is read, so a grant under way cannot be overtaken. For the owner alone.
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
    -- Before the sequence: whoever enters a new timeline reads it under this lock and then sets it.
    PERFORM 1 FROM token_timeline FOR UPDATE;
    -- Changes nothing, and holds the sequence until the end of the transaction.
    ALTER SEQUENCE token_sequence NO CYCLE;
    SELECT greatest(CASE WHEN is_called THEN last_value + 1 ELSE last_value END, above + 1)
    INTO lowest FROM token_sequence;
    EXECUTE format('ALTER SEQUENCE token_sequence RESTART WITH %s', lowest);
    RETURN lowest;
END
$$;

-- Tells the highest token that was handed out, 0 for none, and the timeline it was minted on. For the owner alone.
CREATE OR REPLACE FUNCTION show_tokens(OUT highest bigint, OUT timeline bigint)
LANGUAGE sql STABLE SET search_path FROM CURRENT
AS $$
    SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END, timeline
    FROM token_sequence CROSS JOIN token_timeline
$$;
