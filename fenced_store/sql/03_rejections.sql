-- Records a rejection and, once there are many, deletes the oldest. If the record fails, the
-- rejection still stands.
CREATE OR REPLACE FUNCTION insert_rejection(
    resource text, offered_token bigint, offered_write bigint, stored_token bigint, stored_write bigint,
    stored_at timestamptz, stored_by text, rejected text, refused boolean
) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    keep CONSTANT bigint := 10000;
    newest bigint;
BEGIN
    INSERT INTO rejections AS r (
        resource, offered_token, offered_write, stored_token, stored_write, stored_at, stored_by, rejected, refused
    ) VALUES (
        left(insert_rejection.resource, 1024), insert_rejection.offered_token, insert_rejection.offered_write,
        insert_rejection.stored_token, insert_rejection.stored_write, insert_rejection.stored_at,
        left(insert_rejection.stored_by, 512), left(coalesce(insert_rejection.rejected, describe_session()), 512),
        insert_rejection.refused
    ) RETURNING r.id INTO newest;
    -- Wait for no row: a session that has locked the oldest rows deletes them itself.
    DELETE FROM rejections AS r
    WHERE r.id IN (SELECT o.id FROM rejections AS o WHERE o.id <= newest - keep FOR UPDATE SKIP LOCKED);
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'A rejection by % could not be recorded: %', quote_literal(left(resource, 100)), SQLERRM;
END
$$;

-- Refuses a token that is lower than the stored one with SQLSTATE FEN01. With `warn_only` it raises
-- a warning instead, and records the rejection.
CREATE OR REPLACE FUNCTION refuse(
    resource text, offered bigint, stored bigint, stored_at timestamptz, stored_by text, warn_only boolean
) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    message CONSTANT text := format(
        'Resource %L %s token %s: token %s was %s.', left(resource, 200),
        CASE WHEN warn_only THEN 'would refuse' ELSE 'refuses' END, offered, stored,
        coalesce('stored at ' || stored_at, 'seen there')
    );
BEGIN
    IF warn_only THEN
        PERFORM insert_rejection(resource, offered, NULL, stored, NULL, stored_at, stored_by, NULL, false);
        RAISE WARNING '%', message USING HINT = 'This fence only warns. The write was accepted.';
        RETURN;
    END IF;
    RAISE EXCEPTION '%', message USING
        ERRCODE = 'FEN01',
        DETAIL = json_build_object(
            'resource', resource, 'offered', offered, 'stored', stored, 'stored_by', stored_by,
            'stored_at', to_char(stored_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')
        )::text,
        HINT = 'The lease of this token is over. Acquire the lock again and restart the work.';
END
$$;
