-- Asks the leader that holds this term to hand it over to the candidate with this holder name. The
-- leader finds out with term_demand(). When its term ends, in whatever way, the other candidates
-- yield to the named candidate as long as that candidate waits.
--
-- The reply is `asked`, `absent` (no live candidate has that name), `outranked` (the leader or a
-- candidate that waits has a higher rank, and would take over at once), `leads` (the candidate is
-- the leader), or `over` (the token does not lead).
CREATE OR REPLACE FUNCTION transfer_term(name text, token bigint, candidate text) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := check_election(transfer_term.name) AND commit_durably();
    term record;
    named bigint[];
BEGIN
    IF NOT assert_held(election_lock(transfer_term.name), transfer_term.token) THEN
        RETURN 'over';
    END IF;
    SELECT t.holder, t.rank INTO term FROM terms AS t
    WHERE t.name = transfer_term.name AND t.token = transfer_term.token AND t.ended_at IS NULL;
    IF NOT FOUND THEN
        RETURN 'over';
    END IF;
    SELECT c.rank INTO named FROM live_candidates(transfer_term.name) AS c
    WHERE c.holder = transfer_term.candidate ORDER BY c.rank DESC LIMIT 1;
    IF NOT FOUND THEN
        RETURN CASE WHEN term.holder = transfer_term.candidate THEN 'leads' ELSE 'absent' END;
    END IF;
    IF named < term.rank OR EXISTS (
        SELECT FROM live_candidates(transfer_term.name) AS c WHERE c.rank > named
    ) THEN
        RETURN 'outranked';
    END IF;
    UPDATE terms AS t SET transfer_to = transfer_term.candidate
    WHERE t.name = transfer_term.name AND t.token = transfer_term.token AND t.ended_at IS NULL;
    RETURN CASE WHEN FOUND THEN 'asked' ELSE 'over' END;
END
$$;
