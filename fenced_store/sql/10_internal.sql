-- What the other functions share. None of these is granted to an application's role.

-- Refuses a name that no resource can have.
CREATE OR REPLACE FUNCTION check_resource(resource text) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    IF resource IS NULL OR octet_length(resource) NOT BETWEEN 1 AND 1024 THEN
        RAISE EXCEPTION 'A resource''s name takes 1 to 1024 bytes; this one has %.', coalesce(octet_length(resource), 0)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN true;
END
$$;

-- Refuses what cannot be a token.
CREATE OR REPLACE FUNCTION check_token(resource text, token bigint) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    IF token IS NULL OR token < 1 THEN
        RAISE EXCEPTION 'A fencing token is a whole number from 1; resource % was offered %.',
            quote_literal(resource), coalesce(token::text, 'none')
            USING ERRCODE = 'FEN03';
    END IF;
    RETURN true;
END
$$;

-- Names the calling session, for those who did not say who they are.
CREATE OR REPLACE FUNCTION describe_session() RETURNS text
LANGUAGE sql STABLE
AS $$
    SELECT format(
        '%s@%s backend %s%s', session_user, coalesce(host(inet_client_addr()), 'local'), pg_backend_pid(),
        coalesce(' ' || nullif(current_setting('application_name'), ''), '')
    )
$$;

-- Makes this transaction's commit wait for the disk, whatever the server's, database's or role's default.
CREATE OR REPLACE FUNCTION commit_durably() RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    RETURN true;
END
$$;

-- Notes a refusal. Whatever goes wrong with the note, the refusal stands. The oldest go where there are many.
CREATE OR REPLACE FUNCTION insert_rejection(
    resource text, offered_token bigint, offered_write bigint, stored_token bigint, stored_write bigint,
    stored_at timestamptz, stored_by text, rejected text, refused boolean
) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    keep CONSTANT bigint := 10000;
    noted bigint;
BEGIN
    INSERT INTO rejections AS r (
        resource, offered_token, offered_write, stored_token, stored_write, stored_at, stored_by, rejected, refused
    ) VALUES (
        left(insert_rejection.resource, 1024), insert_rejection.offered_token, insert_rejection.offered_write,
        insert_rejection.stored_token, insert_rejection.stored_write, insert_rejection.stored_at,
        left(insert_rejection.stored_by, 512), left(coalesce(insert_rejection.rejected, describe_session()), 512),
        insert_rejection.refused
    ) RETURNING r.id INTO noted;
    -- Waits for nobody: whoever deletes them meanwhile does it for us.
    DELETE FROM rejections AS r
    WHERE r.id IN (SELECT o.id FROM rejections AS o WHERE o.id <= noted - keep FOR UPDATE SKIP LOCKED);
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'A refusal by % could not be noted: %', quote_literal(left(resource, 100)), SQLERRM;
END
$$;

-- Refuses a token that is lower than the one in the way; or only warns of it, and notes that.
CREATE OR REPLACE FUNCTION refuse(
    resource text, offered bigint, stored bigint, stored_at timestamptz, stored_by text, warn_only boolean
) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    said CONSTANT text := format(
        'Resource %L %s token %s: token %s was %s.', left(resource, 200),
        CASE WHEN warn_only THEN 'would refuse' ELSE 'refuses' END, offered, stored,
        coalesce('stored at ' || stored_at, 'seen there')
    );
BEGIN
    IF warn_only THEN
        PERFORM insert_rejection(resource, offered, NULL, stored, NULL, stored_at, stored_by, NULL, false);
        RAISE WARNING '%', said USING HINT = 'This fence only warns; the write went through.';
        RETURN;
    END IF;
    RAISE EXCEPTION '%', said USING
        ERRCODE = 'FEN01',
        DETAIL = json_build_object(
            'resource', resource, 'offered', offered, 'stored', stored, 'stored_by', stored_by,
            'stored_at', to_char(stored_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')
        )::text,
        HINT = 'The lease that this token came with is over. Acquire the lock anew, and do the work again from the start.';
END
$$;
