-- Returns the highest token that any fence of this schema has seen, including those of protected
-- tables, 0 for none. It runs with the privileges of the caller, who must be able to read all of
-- them: usually the owner.
CREATE OR REPLACE FUNCTION high_water() RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT
AS $$
DECLARE
    highest bigint;
    target regclass;
BEGIN
    SELECT greatest(max(f.token), 0) INTO highest FROM fences AS f;
    FOR target IN SELECT p.target FROM protected_tables() AS p WHERE p.per = 'row' LOOP
        highest := greatest(highest, highest_token(target));
    END LOOP;
    RETURN highest;
END
$$;
