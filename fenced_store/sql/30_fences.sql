-- The fences of protected rows and tables. The functions in the files 30 to 42 run for the owner of
-- a protected table, who needs EXECUTE on them. A role that writes to the table needs none of them.

-- Keeps the fence of a row that is deleted or gets another key. Never lowers a fence.
CREATE OR REPLACE FUNCTION preserve_fence(row_resource text, token bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
BEGIN
    IF preserve_fence.token > 0 THEN
        ready := check_resource(row_resource);
        INSERT INTO fences AS f (resource, token, stored_at, stored_by, purgeable)
        VALUES (row_resource, preserve_fence.token, clock_timestamp(), left(describe_session(), 512), true)
        ON CONFLICT (resource) DO UPDATE
        SET token = excluded.token, write_number = 0, stored_at = excluded.stored_at, stored_by = excluded.stored_by
        WHERE f.token < excluded.token;
    END IF;
END
$$;

-- Returns the token of a row's fence, 0 for none. An INSERT without a token stores it with the row.
-- It is volatile, so that it reads the latest fence also for a statement that has waited.
CREATE OR REPLACE FUNCTION current_fence(row_resource text) RETURNS bigint
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT coalesce(max(f.token), 0) FROM fences AS f WHERE f.resource = row_resource
$$;

-- Returns the highest token of all fences of a table and its rows, 0 for none.
CREATE OR REPLACE FUNCTION highest_fence(table_resource text) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT coalesce(max(f.token), 0)
    FROM fences AS f
    -- A semicolon is the character after a colon, so this is an index range.
    WHERE f.resource = table_resource OR (f.resource > table_resource || ':' AND f.resource < table_resource || ';')
$$;
