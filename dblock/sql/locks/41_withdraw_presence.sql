-- Reports that a process is alive although its presence has ended. From here on only the ttl of its
-- leases decides. `lost` has the positions (from 1) of the grants that are not held any more,
-- because another client took the lock before.
CREATE OR REPLACE FUNCTION withdraw_presence(presence uuid, names text[], tokens bigint[], OUT lost integer[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
BEGIN
    ready := commit_asynchronously();
    DELETE FROM lock_presence AS p WHERE p.presence = withdraw_presence.presence;
    SELECT array_agg(a.position::integer ORDER BY a.position) INTO lost
    FROM unnest(names, tokens) WITH ORDINALITY AS a (name, token, position)
    WHERE NOT EXISTS (
        SELECT FROM distributed_locks AS l
        WHERE l.name = a.name AND l.token = a.token AND l.expires_at > clock_timestamp()
    );
END
$$;
