-- Returns what operators did to one schedule or to all, and the changes of definitions, newest
-- first.
CREATE OR REPLACE FUNCTION list_schedule_events(name text DEFAULT NULL, max_rows integer DEFAULT 100)
RETURNS TABLE (at timestamptz, name text, event text, actor text, reason text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT e.at, e.name, e.event, e.actor, e.reason
    FROM schedule_events AS e
    WHERE list_schedule_events.name IS NULL OR e.name = list_schedule_events.name
    ORDER BY e.number DESC
    LIMIT list_schedule_events.max_rows
$$;
