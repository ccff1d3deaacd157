-- Returns the terms of an election in the order of their tokens: those after the token `since`, and
-- the term of `since` itself if it has ended since then. With `ended` the caller has seen that end
-- already. Without `since`, only the newest term.
--
-- `forgotten` means that terms after `since` are not kept any more: the newest ten thousand of each
-- name are. For roles that may lock, and for roles that may see.
CREATE OR REPLACE FUNCTION list_terms(
    name text,
    since bigint DEFAULT NULL,
    ended boolean DEFAULT false,
    max_rows integer DEFAULT 1000,
    OUT terms json,
    OUT forgotten boolean
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_asynchronously();
BEGIN
    PERFORM record_ended_term(list_terms.name);
    -- One statement, so that what is returned and what is forgotten come from one snapshot.
    SELECT
        (SELECT json_agg(json_build_object(
                    'token', r.token, 'holder', r.holder, 'value', r.value,
                    'began_at', date_part('epoch', r.began_at), 'ended_at', date_part('epoch', r.ended_at),
                    'how', r.how
                ) ORDER BY r.token)
         FROM (
             SELECT * FROM terms AS t
             WHERE t.name = list_terms.name
               AND (
                   t.token > list_terms.since
                   OR (t.token = list_terms.since AND t.ended_at IS NOT NULL AND NOT list_terms.ended)
                   OR (list_terms.since IS NULL
                       AND t.token = (SELECT max(o.token) FROM terms AS o WHERE o.name = list_terms.name))
               )
             ORDER BY t.token LIMIT list_terms.max_rows
         ) AS r),
        coalesce(
            (SELECT o.number > 1 AND o.token > list_terms.since FROM terms AS o
             WHERE o.name = list_terms.name ORDER BY o.number LIMIT 1),
            false
        )
    INTO terms, forgotten;
END
$$;
