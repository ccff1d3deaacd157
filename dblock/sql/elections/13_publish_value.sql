-- Replaces the value that a leader publishes, such as its address. False means that this token does
-- not lead: only the holder of the term may change its value.
CREATE OR REPLACE FUNCTION publish_value(name text, token bigint, value jsonb) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := check_election(publish_value.name, value => publish_value.value) AND commit_durably();
BEGIN
    IF NOT assert_held(election_lock(publish_value.name), publish_value.token) THEN
        RETURN false;
    END IF;
    UPDATE terms AS t SET value = publish_value.value
    WHERE t.name = publish_value.name AND t.token = publish_value.token AND t.ended_at IS NULL;
    RETURN FOUND;
END
$$;
