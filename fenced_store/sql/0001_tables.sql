-- The tables of revision 1. This file is frozen once released: later changes go into a file with
-- the next number.

-- One row per resource: the highest (token, write number) that it has accepted or that was claimed
-- for it, and for a key of the store its value. A row outlives the value, so that a deletion keeps
-- the fence.
CREATE TABLE fences (
    -- Compared byte by byte. An upgrade of the operating system may change a collation under an
    -- index, and break its uniqueness.
    resource text COLLATE "C" NOT NULL,
    token bigint NOT NULL,
    write_number bigint NOT NULL DEFAULT 0,
    stored_at timestamptz NOT NULL,
    stored_by text,
    -- The number of writes of a key. 0 means that there is only a fence.
    version bigint NOT NULL DEFAULT 0,
    value jsonb,
    data bytea,
    -- The token, time and writer of the value, if the fence was raised since without a write.
    value_token bigint,
    value_at timestamptz,
    value_by text,
    -- Identifies the last write without a token, so that a retry is recognised.
    attempt uuid,
    -- The fence of a deleted row, or an empty fence that a check inserted. Only these may be
    -- purged.
    purgeable boolean NOT NULL DEFAULT false,
    CONSTRAINT fences_pkey PRIMARY KEY (resource)
) WITH (
    -- Each page has free room and no column that changes is indexed, so a write is a heap-only
    -- update.
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.05
);
COMMENT ON TABLE fences IS 'One row per resource: the highest token that it has accepted or that was claimed for it.';

CREATE TABLE versions (
    resource text COLLATE "C" NOT NULL,
    version bigint NOT NULL,
    token bigint NOT NULL,
    write_number bigint NOT NULL,
    stored_at timestamptz NOT NULL,
    stored_by text,
    value jsonb,
    data bytea,
    attempt uuid,
    CONSTRAINT versions_pkey PRIMARY KEY (resource, version)
);
COMMENT ON TABLE versions IS 'The last versions of each key of the store. A version without a value is a deletion.';

CREATE TABLE protections (
    resource text COLLATE "C" NOT NULL,
    -- Follows the table when it is renamed. The resource keeps its name.
    target regclass NOT NULL,
    per text NOT NULL,
    strict boolean NOT NULL,
    warn_only boolean NOT NULL,
    key text[],
    -- Whether the fence added its columns, and so may drop them.
    own_columns boolean NOT NULL,
    CONSTRAINT protections_pkey PRIMARY KEY (resource),
    CONSTRAINT protections_target_key UNIQUE (target)
);
COMMENT ON TABLE protections IS 'The tables that are protected, and how.';

CREATE TABLE rejections (
    id bigint GENERATED ALWAYS AS IDENTITY,
    resource text NOT NULL,
    -- NULL if the writer carried no token.
    offered_token bigint,
    offered_write bigint,
    stored_token bigint,
    stored_write bigint,
    stored_at timestamptz,
    -- The writer that stored the higher token.
    stored_by text,
    rejected_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    rejected text,
    -- False if the fence only warned.
    refused boolean NOT NULL,
    CONSTRAINT rejections_pkey PRIMARY KEY (id)
);
COMMENT ON TABLE rejections IS
    'The latest rejections: the token that a writer offered to a resource, and the token that was stored.';
