-- Records a rejection that raised an error, which rolled back its own record. The client that
-- received the error calls it on another connection.
CREATE OR REPLACE FUNCTION record_rejection(
    resource text, offered bigint, stored bigint, stored_at timestamptz, stored_by text, writer text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
BEGIN
    PERFORM insert_rejection(
        record_rejection.resource, record_rejection.offered, NULL, record_rejection.stored, NULL,
        record_rejection.stored_at, record_rejection.stored_by, record_rejection.writer, true
    );
END
$$;
