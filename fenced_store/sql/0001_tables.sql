-- The tables, as they were first. Frozen once released: what comes later is a file of its own, with the next number.

-- One row a resource: the highest (token, write number) that it has accepted or that was claimed for it, and for a key of
-- the store its value. A row outlives the value, so that deleting keeps the fence.
CREATE TABLE fences (
    -- Compared byte by byte: a collation may change under an index with the operating system, and uniqueness with it.
    resource text COLLATE "C" NOT NULL,
    token bigint NOT NULL,
    write_number bigint NOT NULL DEFAULT 0,
    stored_at timestamptz NOT NULL,
    stored_by text,
    -- Counts the writes of a key; 0 where nothing was ever written and there is only a fence.
    version bigint NOT NULL DEFAULT 0,
    value jsonb,
    data bytea,
    -- Of the value, where the fence was raised since without a write: who wrote it, when, and with which token.
    value_token bigint,
    value_at timestamptz,
    value_by text,
    -- Names the last write that carried no token, to know it again.
    attempt uuid,
    -- Left behind by a row that was deleted, or by a look at one: the only fences that may ever be forgotten.
    purgeable boolean NOT NULL DEFAULT false,
    CONSTRAINT fences_pkey PRIMARY KEY (resource)
) WITH (
    -- Room on each page, and no column that changes is indexed, so that a write is a heap-only update.
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.05
);
COMMENT ON TABLE fences IS 'One row a resource: the highest token that it has accepted or that was claimed for it.';

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
COMMENT ON TABLE versions IS 'The last versions of each key of the store; one without a value is a deletion.';

CREATE TABLE protections (
    resource text COLLATE "C" NOT NULL,
    -- Follows the table when it is renamed; the resource does not.
    target regclass NOT NULL,
    per text NOT NULL,
    strict boolean NOT NULL,
    warn_only boolean NOT NULL,
    key text[],
    -- Whether the fence has added its columns, and so may drop them.
    own_columns boolean NOT NULL,
    CONSTRAINT protections_pkey PRIMARY KEY (resource),
    CONSTRAINT protections_target_key UNIQUE (target)
);
COMMENT ON TABLE protections IS 'The tables that are protected, and how.';

CREATE TABLE rejections (
    id bigint GENERATED ALWAYS AS IDENTITY,
    resource text NOT NULL,
    -- NULL where the writer carried none.
    offered_token bigint,
    offered_write bigint,
    stored_token bigint,
    stored_write bigint,
    stored_at timestamptz,
    -- Who had stored the token that was in the way.
    stored_by text,
    rejected_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    rejected text,
    -- False where it was only warned of.
    refused boolean NOT NULL,
    CONSTRAINT rejections_pkey PRIMARY KEY (id)
);
COMMENT ON TABLE rejections IS 'The latest refusals: what was offered to which resource, by whom, and what was in the way.';
