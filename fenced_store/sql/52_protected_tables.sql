-- Lists all protected tables, including those that the caller may not read. `enabled` is false if a
-- trigger of the table or a partition is disabled, or if this session fires no triggers, because
-- its session_replication_role is replica.
CREATE OR REPLACE FUNCTION protected_tables(
    OUT resource text, OUT target regclass, OUT per text, OUT strict boolean, OUT warn_only boolean, OUT key text[],
    OUT enabled boolean
) RETURNS SETOF record
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT p.resource, p.target, p.per, p.strict, p.warn_only, p.key,
           current_setting('session_replication_role') <> 'replica' AND NOT EXISTS (
               SELECT FROM pg_trigger AS t
               WHERE t.tgrelid IN (SELECT p.target UNION SELECT leaf.relid FROM pg_partition_tree(p.target) AS leaf)
                 AND starts_with(t.tgname, 'zz_fenced_store') AND t.tgenabled NOT IN ('O', 'A')
           )
    FROM protections AS p
    WHERE EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgrelid = p.target AND t.tgname = 'zz_fenced_store')
    ORDER BY p.resource
$$;
