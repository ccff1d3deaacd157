-- Deletes a schedule that is not used any more, with its ledger, so that it is not overdue for
-- ever. Its events stay. A host that still calls claim_slot() registers it again. False means that
-- there is no such schedule.
CREATE OR REPLACE FUNCTION delete_schedule(name text, actor text DEFAULT NULL, reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_durably();
BEGIN
    DELETE FROM schedules AS s WHERE s.name = delete_schedule.name;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM slot_runs AS r WHERE r.name = delete_schedule.name;
    PERFORM record_schedule_event(delete_schedule.name, 'deleted', actor, reason);
    RETURN true;
END
$$;
