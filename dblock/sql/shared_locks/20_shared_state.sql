-- Returns what is known of a read-write lock or a semaphore: its kind, for a semaphore how many
-- permits it has and how many of them no live holder has, and its holders as a JSON array in the
-- order of their grants. A holder whose process is known to be gone (see remaining_grace) is left
-- out. The kind is 'plain' if the name is that of a plain lock, and NULL if it has no kind yet.
CREATE OR REPLACE FUNCTION shared_state(
    name text, OUT kind text, OUT permits integer, OUT available integer, OUT holders json
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    gone uuid[];
BEGIN
    SELECT coalesce(l.kind, 'plain'), l.permits INTO kind, permits FROM distributed_locks AS l
    WHERE l.name = shared_state.name AND l.head IS NULL
      -- A row that has had no holder may still get another kind.
      AND (l.kind IS NOT NULL OR l.token > 0 OR l.expires_at > '-infinity');
    -- Each presence once, however many shares are tied to it.
    SELECT coalesce(array_agg(p.presence), '{}') INTO gone
    FROM (
        SELECT DISTINCT s.presence FROM distributed_locks AS s
        WHERE s.head = shared_state.name AND s.expires_at > clock_timestamp() AND s.presence IS NOT NULL
    ) AS p
    WHERE remaining_grace(p.presence, false, true) <= 0;
    -- greatest() ignores a NULL, and a read-write lock has no permits.
    SELECT CASE WHEN shared_state.permits IS NOT NULL THEN greatest(shared_state.permits - count(*), 0) END,
           coalesce(
               json_agg(
                   json_build_object(
                       'share', s.name, 'permit', s.permit, 'token', s.token, 'holder', s.holder, 'meta', s.meta,
                       'granted_at', date_part('epoch', s.granted_at), 'expires_at', date_part('epoch', s.expires_at),
                       -- Subtract numbers: Postgres before 17 cannot subtract from infinity.
                       'remaining', date_part('epoch', s.expires_at) - date_part('epoch', clock_timestamp())
                   )
                   ORDER BY s.token
               ),
               '[]'
           )
    INTO available, holders
    FROM distributed_locks AS s
    WHERE s.head = shared_state.name AND s.expires_at > clock_timestamp()
      AND (s.presence IS NULL OR s.presence <> ALL (gone));
END
$$;
