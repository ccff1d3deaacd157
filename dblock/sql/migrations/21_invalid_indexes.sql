-- Returns the indexes that a failed CREATE INDEX CONCURRENTLY or REINDEX CONCURRENTLY has left
-- behind. Such an index slows down every write and serves no query. An index that is being built
-- does not count.
CREATE OR REPLACE FUNCTION invalid_indexes()
RETURNS TABLE (index_name text, table_name text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT format('%I.%I', n.nspname, c.relname), i.indrelid::regclass::text
    FROM pg_index AS i
    JOIN pg_class AS c ON c.oid = i.indexrelid
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE NOT i.indisvalid AND c.relkind = 'i'
      AND NOT EXISTS (
          SELECT FROM pg_locks AS k
          -- CONCURRENTLY holds this lock on the table from the first step to the last.
          WHERE k.relation = i.indrelid AND k.granted AND k.mode = 'ShareUpdateExclusiveLock'
            AND k.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
            -- VACUUM and ANALYZE hold the same lock, and build no index.
            AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum AS v WHERE v.pid = k.pid)
            AND NOT EXISTS (SELECT FROM pg_stat_progress_analyze AS a WHERE a.pid = k.pid)
      )
    ORDER BY 1
$$;
