-- Asks for one run outside of the schedule, also while the schedule is paused. The next host that
-- calls claim_slot() runs it, once no run is active. False means that there is no such schedule, or
-- that such a run is waiting already.
CREATE OR REPLACE FUNCTION run_schedule(name text, actor text DEFAULT NULL, reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_durably();
BEGIN
    UPDATE schedules AS s SET requested_at = clock_timestamp()
    WHERE s.name = run_schedule.name AND s.requested_at IS NULL;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM record_schedule_event(run_schedule.name, 'run now', actor, reason);
    RETURN true;
END
$$;
