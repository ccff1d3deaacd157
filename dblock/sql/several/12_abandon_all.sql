-- Gives back the grants and the tickets of an attempt for several locks, and wakes the next
-- waiters. In its own transaction it commits asynchronously, like release(). Returns for how many
-- of the locks there was something to give back. With `only_tickets` grants stay, and the first
-- waiter of each of these locks that is free is woken in any case.
CREATE OR REPLACE FUNCTION abandon_all(names text[], attempt uuid, only_tickets boolean DEFAULT false)
RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
    one text;
    gave_back integer := 0;
BEGIN
    ready := commit_asynchronously();
    FOR one IN SELECT DISTINCT n.name COLLATE "C" FROM unnest(abandon_all.names) AS n (name) ORDER BY 1 LOOP
        IF abandon(one, abandon_all.attempt, abandon_all.only_tickets) THEN
            gave_back := gave_back + 1;
        ELSIF abandon_all.only_tickets AND lock_row_briefly(one) THEN
            PERFORM wake_if_free(one);
        END IF;
    END LOOP;
    RETURN gave_back;
END
$$;
