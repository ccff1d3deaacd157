-- Describes each public function where an administrator looks: \df+ in psql, or a database browser.
DO $$
DECLARE
    described CONSTANT jsonb := $json${
"raise_fence": "Takes the fence of a resource in this transaction and holds it until the end, or refuses a stale token (FEN01).",
"claim": "Raises the fences of resources to a token before anything is written. Waits at most `patience` seconds for transactions that have passed them.",
"write": "Writes a key of the store under a token, a version or both, and returns the outcome: stored, repeated, stale or conflict.",
"read": "Returns the value of a key. No row: there is none.",
"history": "Returns the latest versions of a key, newest first.",
"protect_table": "Puts a fence on a table that you own: stale tokens are refused for every client and language.",
"unprotect_table": "Removes the fence of a table that you own.",
"protected_tables": "Lists the protected tables, and how each is protected.",
"record_rejection": "Adds a refusal to the log. Call it on another connection after an error FEN01, which rolled back its own entry.",
"revision": "Returns the installed revision of this schema.",
"high_water": "For the owner: returns the highest token that any fence has seen.",
"purge_deleted_fences": "For the owner: deletes the fences of deleted rows that are older than that, at least a day, and calls purge_dropped_tables().",
"purge_dropped_tables": "For the owner: drops the gates and functions of protected tables that no longer exist, and returns how many tables these were."
}$json$;
    thing record;
BEGIN
    FOR thing IN
        SELECT p.oid::regprocedure AS name, described ->> p.proname AS text
        FROM pg_proc AS p
        WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND described ? p.proname
    LOOP
        EXECUTE format('COMMENT ON FUNCTION %s IS %L', thing.name, thing.text);
    END LOOP;
END
$$;
