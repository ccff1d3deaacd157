-- Lists all protected tables, including those that the caller may not read.
CREATE OR REPLACE FUNCTION protected_tables(
    OUT resource text, OUT target regclass, OUT per text, OUT strict boolean, OUT warn_only boolean, OUT key text[],
    OUT enabled boolean
) RETURNS SETOF record
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT p.resource, p.target, p.per, p.strict, p.warn_only, p.key, t.tgenabled IN ('O', 'A')
    FROM protections AS p
    JOIN pg_trigger AS t ON t.tgrelid = p.target AND t.tgname = 'zz_fenced_store'
    ORDER BY p.resource
$$;
