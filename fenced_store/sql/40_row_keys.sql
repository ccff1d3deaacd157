-- Encodes the values of a key as one text. Different keys give different texts. Strings with a
-- backslash are E strings, because standard_conforming_strings may be off.
CREATE OR REPLACE FUNCTION row_key(VARIADIC key text[]) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    -- No key produces a backslash before any character but a backslash or a comma.
    SELECT CASE
        WHEN octet_length(convert_to(k, 'UTF8')) <= 512 THEN k
        ELSE E'\\#' || encode(sha256(convert_to(k, 'UTF8')), 'hex')
    END
    FROM (
        SELECT string_agg(replace(replace(v, E'\\', E'\\\\'), ',', E'\\,'), ',' ORDER BY position) AS k
        FROM unnest(key) WITH ORDINALITY AS u (v, position)
    ) AS joined
$$;

-- Returns the expression that converts a key column to text, with placeholders for the row and the
-- column. Equal values give equal texts, and no session setting has an influence. NULL means that
-- this cannot be guaranteed for the type.
--
-- Each expression begins with concat(), which calls the type's own output function. A cast may be
-- user-defined, and would run with the privileges of the trigger's owner.
CREATE OR REPLACE FUNCTION key_expression(column_type oid, column_collation oid) RETURNS text
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT
AS $$
DECLARE
    base record;
BEGIN
    SELECT t.oid, t.typtype, t.typbasetype INTO base FROM pg_type AS t WHERE t.oid = column_type;
    IF base.typtype = 'd' THEN
        RETURN key_expression(base.typbasetype, column_collation);
    ELSIF EXISTS (SELECT FROM pg_collation AS c WHERE c.oid = column_collation AND NOT c.collisdeterministic) THEN
        RETURN NULL;
    END IF;
    RETURN CASE
        WHEN base.typtype = 'e' OR column_type IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'oid'::regtype,
            'bool'::regtype, 'uuid'::regtype, 'text'::regtype, 'varchar'::regtype, 'name'::regtype, 'time'::regtype,
            'inet'::regtype, 'cidr'::regtype, 'macaddr'::regtype) THEN 'concat(%s.%I)'
        WHEN column_type = 'bpchar'::regtype THEN 'rtrim(concat(%s.%I), '' '')'
        WHEN column_type = 'numeric'::regtype THEN 'trim_scale(concat(%s.%I)::numeric)::text'
        WHEN column_type = 'bytea'::regtype THEN 'encode(concat(%s.%I)::bytea, ''hex'')'
        WHEN column_type = 'date'::regtype THEN 'to_jsonb(concat(%s.%I)::date) #>> ''{}'''
        WHEN column_type = 'timestamp'::regtype THEN 'to_jsonb(concat(%s.%I)::timestamp) #>> ''{}'''
        WHEN column_type = 'timestamptz'::regtype
            THEN 'to_jsonb(concat(%s.%I)::timestamptz AT TIME ZONE ''UTC'') #>> ''{}'''
    END;
END
$$;

-- Returns whether values of a type are short and need no escaping, so that a key of one such column
-- is its own text.
CREATE OR REPLACE FUNCTION is_plain_type(column_type oid) RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$
    SELECT column_type IN (
        'int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'oid'::regtype, 'uuid'::regtype, 'bool'::regtype
    )
$$;
