-- Records how far a run has come, for list_migrations(). False means that the run has ended.
CREATE OR REPLACE FUNCTION note_revision(run bigint, token bigint, revision text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
BEGIN
    UPDATE migration_runs AS r
    SET revision = left(note_revision.revision, 1024)
    WHERE r.run = note_revision.run AND r.token = note_revision.token AND r.outcome IS NULL;
    RETURN FOUND;
END
$$;
