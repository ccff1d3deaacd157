-- Returns the leader of an election. No token means that there is none: before the first term,
-- after the end of a term, and as soon as the leader is known to be dead.
--
-- `doubt` is set if the leader's session has just ended: ask again after so many seconds. For roles
-- that may lock, and for roles that may see.
CREATE OR REPLACE FUNCTION election_leader(
    name text,
    OUT token bigint,
    OUT holder text,
    OUT value jsonb,
    OUT began_at timestamptz,
    OUT doubt double precision
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_asynchronously();
BEGIN
    doubt := record_ended_term(election_leader.name);
    SELECT t.token, t.holder, t.value, t.began_at INTO token, holder, value, began_at
    FROM terms AS t JOIN distributed_locks AS l ON l.name = election_lock(t.name) AND l.token = t.token
    WHERE t.name = election_leader.name AND t.ended_at IS NULL AND l.expires_at > clock_timestamp();
END
$$;
