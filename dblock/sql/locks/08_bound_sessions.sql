-- Sessions that work under a token. A transaction that proves a lease, or that is bound to it,
-- holds a shared advisory lock whose key is the token. So pg_locks shows which session works under
-- which token, without a write, and the mark ends with the transaction.
--
-- The key has 64 bits: ten bits with the number 475 (0x1DB), one bit that is set for a grant
-- without a fencing token, and 53 bits with the absolute value of the token. The lock is only tried
-- and never blocks. If another session has locked the key exclusively, the mark is missing, and a
-- deadlock that leads through this transaction is not found.

-- Returns the key of the advisory lock of a token.
CREATE OR REPLACE FUNCTION token_key(token bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE
AS $$
    SELECT (475::bigint << 54) | CASE WHEN token < 0 THEN 1::bigint << 53 ELSE 0 END
        | (abs(token) & ((1::bigint << 53) - 1))
$$;

-- Returns the sessions of this database that work under a token, and whether each of them waits for
-- a lock of Postgres.
CREATE OR REPLACE FUNCTION bound_sessions() RETURNS TABLE (session integer, token bigint, waits boolean)
LANGUAGE sql STABLE
AS $$
    WITH locks AS MATERIALIZED (
        SELECT k.pid, k.granted,
               -- The keys of presences are hashes, and one in a thousand looks like a token's.
               k.locktype = 'advisory' AND k.mode = 'ShareLock' AND k.objsubid = 1 AND k.classid::bigint >> 22 = 475
                   AND k.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
                   AS binds,
               CASE WHEN k.classid::bigint & (1 << 21) <> 0 THEN -1 ELSE 1 END
                   * (((k.classid::bigint & ((1 << 21) - 1)) << 32) | k.objid::bigint) AS token
        FROM pg_locks AS k
    )
    SELECT b.pid, b.token, EXISTS (SELECT FROM locks AS w WHERE w.pid = b.pid AND NOT w.granted)
    FROM locks AS b
    WHERE b.binds AND b.granted
$$;
