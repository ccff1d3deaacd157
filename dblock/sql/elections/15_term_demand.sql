-- Returns why the leader that holds this term should end it: `transfer` (another candidate was
-- named by transfer_term()), `priority` (a live candidate with a higher rank waits), `over` (the
-- log does not have the term as open: it has ended, or a standby was promoted that had not received
-- it), or NULL for no reason. A leader asks about twice a second.
CREATE OR REPLACE FUNCTION term_demand(name text, token bigint) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_asynchronously();
    term record;
BEGIN
    SELECT t.transfer_to, t.rank, t.ended_at INTO term FROM terms AS t
    WHERE t.name = term_demand.name AND t.token = term_demand.token;
    IF NOT FOUND OR term.ended_at IS NOT NULL THEN
        RETURN 'over';
    END IF;
    IF term.transfer_to IS NOT NULL THEN
        RETURN 'transfer';
    END IF;
    IF EXISTS (SELECT FROM candidates AS c WHERE c.name = term_demand.name AND c.rank > term.rank)
        AND EXISTS (SELECT FROM live_candidates(term_demand.name) AS c WHERE c.rank > term.rank)
    THEN
        RETURN 'priority';
    END IF;
    RETURN NULL;
END
$$;
