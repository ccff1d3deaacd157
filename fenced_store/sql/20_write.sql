-- Writes a key of the store, or deletes it if `value` and `data` are NULL. With a token, the write
-- is accepted if (token, write number) is greater than the stored pair. With `if_version`, it is
-- accepted if the key has that version, where 0 means that the key does not exist. With both, both
-- must hold.
--
-- `outcome` is `stored`, `repeated` (the same write was accepted before), `stale` (a higher pair is
-- stored) or `conflict` (the version differs). A rejection raises no error, because an error would
-- roll back the record of the rejection.
CREATE OR REPLACE FUNCTION write(
    resource text,
    token bigint,
    write_number bigint,
    value jsonb,
    data bytea,
    if_version bigint DEFAULT NULL,
    attempt uuid DEFAULT NULL,
    keep integer DEFAULT 10,
    writer text DEFAULT NULL,
    OUT outcome text,
    OUT version bigint,
    OUT stored_token bigint,
    OUT stored_write bigint,
    OUT stored_at timestamptz
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
    seen record;
    ignored text;
BEGIN
    IF (
        octet_length(write.resource) BETWEEN 1 AND 1024 AND coalesce(write.token >= 1, write.if_version >= 0)
    ) IS NOT TRUE THEN
        -- One of these checks raises the error.
        ready := check_resource(write.resource) AND check_token(write.resource, write.token);
    END IF;
    write_number := coalesce(write.write_number, 0);
    -- Hot path: commit_durably() inlined.
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        ignored := set_config('synchronous_commit', 'on', true);
    END IF;
    IF write.if_version IS NULL THEN
        INSERT INTO fences AS f (resource, token, write_number, stored_at, stored_by, version, value, data)
        VALUES (
            write.resource, write.token, write.write_number, clock_timestamp(), write.writer, 1, write.value, write.data
        )
        ON CONFLICT (resource) DO UPDATE SET
            token = excluded.token,
            write_number = excluded.write_number,
            stored_at = excluded.stored_at,
            stored_by = excluded.stored_by,
            version = f.version + 1,
            value = excluded.value,
            data = excluded.data,
            value_token = NULL,
            value_at = NULL,
            value_by = NULL,
            attempt = NULL,
            purgeable = false
        WHERE (excluded.token, excluded.write_number) > (f.token, f.write_number)
        RETURNING 'stored', f.version, f.token, f.write_number, f.stored_at
        INTO outcome, version, stored_token, stored_write, stored_at;
    ELSE
        INSERT INTO fences AS f (resource, token, write_number, stored_at, stored_by, version, value, data, attempt)
        SELECT write.resource, coalesce(write.token, 0), write.write_number, clock_timestamp(), write.writer,
               1, write.value, write.data, write.attempt
        WHERE write.if_version = 0 OR EXISTS (SELECT FROM fences AS o WHERE o.resource = write.resource)
        ON CONFLICT (resource) DO UPDATE SET
            token = coalesce(write.token, f.token),
            write_number = CASE WHEN write.token IS NULL THEN f.write_number ELSE excluded.write_number END,
            stored_at = excluded.stored_at,
            stored_by = excluded.stored_by,
            version = f.version + 1,
            value = excluded.value,
            data = excluded.data,
            value_token = NULL,
            value_at = NULL,
            value_by = NULL,
            attempt = excluded.attempt,
            purgeable = false
        WHERE (write.token IS NULL OR (excluded.token, excluded.write_number) > (f.token, f.write_number))
          AND write.if_version = CASE WHEN f.value IS NULL AND f.data IS NULL THEN 0 ELSE f.version END
        RETURNING 'stored', f.version, f.token, f.write_number, f.stored_at
        INTO outcome, version, stored_token, stored_write, stored_at;
    END IF;
    IF FOUND THEN
        IF write.keep > 0 THEN
            INSERT INTO versions (
                resource, version, token, write_number, stored_at, stored_by, value, data, attempt
            ) VALUES (
                write.resource, write.version, write.stored_token, write.stored_write, write.stored_at, write.writer,
                write.value, write.data, write.attempt
            );
            IF write.version > write.keep THEN
                DELETE FROM versions AS v WHERE v.resource = write.resource AND v.version <= write.version - write.keep;
            END IF;
        END IF;
        RETURN;
    END IF;

    SELECT f.* INTO seen FROM fences AS f WHERE f.resource = write.resource;
    version := coalesce(seen.version, 0);
    stored_token := coalesce(seen.token, 0);
    stored_write := coalesce(seen.write_number, 0);
    stored_at := seen.stored_at;
    IF write.token IS NOT NULL AND (write.token, write.write_number) <= (stored_token, stored_write) THEN
        IF (write.token, write.write_number) = (stored_token, stored_write)
            AND seen.version > 0
            AND seen.value IS NOT DISTINCT FROM write.value AND seen.data IS NOT DISTINCT FROM write.data
        THEN
            outcome := 'repeated';
            RETURN;
        END IF;
        -- The write may have been accepted and overwritten since.
        SELECT 'repeated', v.version INTO outcome, version
        FROM versions AS v
        WHERE v.resource = write.resource AND v.token = write.token AND v.write_number = write.write_number
          AND v.value IS NOT DISTINCT FROM write.value AND v.data IS NOT DISTINCT FROM write.data;
        IF NOT FOUND THEN
            outcome := 'stale';
            version := seen.version;
            PERFORM insert_rejection(
                write.resource, write.token, write.write_number, stored_token, stored_write, stored_at, seen.stored_by,
                write.writer, true
            );
        END IF;
        RETURN;
    END IF;
    IF seen.attempt = write.attempt THEN
        outcome := 'repeated';
        RETURN;
    END IF;
    SELECT 'repeated', v.version INTO outcome, version
    FROM versions AS v WHERE v.resource = write.resource AND v.attempt = write.attempt;
    IF NOT FOUND THEN
        outcome := 'conflict';
        version := CASE WHEN seen.value IS NULL AND seen.data IS NULL THEN 0 ELSE seen.version END;
    END IF;
END
$$;
