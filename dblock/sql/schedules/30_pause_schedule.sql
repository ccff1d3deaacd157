-- Pauses a schedule: no slot of it starts until resume_schedule(). A run that is active continues.
-- False means that there is no such schedule, or that it is paused already.
CREATE OR REPLACE FUNCTION pause_schedule(name text, actor text DEFAULT NULL, reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_durably();
BEGIN
    UPDATE schedules AS s
    SET paused_at = clock_timestamp(),
        paused_by = format('%s as %s', left(coalesce(actor, describe_session()), 400), session_user),
        pause_reason = left(reason, 2048)
    WHERE s.name = pause_schedule.name AND s.paused_at IS NULL;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM record_schedule_event(pause_schedule.name, 'paused', actor, reason);
    RETURN true;
END
$$;

-- Ends the pause of a schedule. Slots that were due during the pause are not run, whatever its
-- catch_up says. False means that there is no such schedule, or that it is not paused.
CREATE OR REPLACE FUNCTION resume_schedule(name text, actor text DEFAULT NULL, reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean := commit_durably();
BEGIN
    UPDATE schedules AS s
    SET paused_at = NULL, paused_by = NULL, pause_reason = NULL, since = greatest(s.since, clock_timestamp())
    WHERE s.name = resume_schedule.name AND s.paused_at IS NOT NULL;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM record_schedule_event(resume_schedule.name, 'resumed', actor, reason);
    RETURN true;
END
$$;
