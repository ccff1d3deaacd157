-- Checks that the other functions share. No application role may call the functions in the files 01
-- to 04.

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

-- Refuses a value that cannot be a fencing token.
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

-- Names the calling session, for callers that gave no writer.
CREATE OR REPLACE FUNCTION describe_session() RETURNS text
LANGUAGE sql STABLE
AS $$
    SELECT format(
        '%s@%s backend %s%s', session_user, coalesce(host(inet_client_addr()), 'local'), pg_backend_pid(),
        coalesce(' ' || nullif(current_setting('application_name'), ''), '')
    )
$$;
