-- Returns what the ledger knows about a slot, from its newest run. No row means that the slot is
-- not decided. `outcome` is NULL while the slot runs, and `queued` while it waits for the run
-- before it. `alive` is false if the run has not ended and its lease is over.
CREATE OR REPLACE FUNCTION slot_outcome(name text, slot timestamptz)
RETURNS TABLE (outcome text, exit_code integer, error text, holder text, token bigint, alive boolean)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
    SELECT r.outcome, r.exit_code, r.error, r.holder, r.token,
           r.outcome IS NULL AND EXISTS (
               SELECT FROM distributed_locks AS l
               WHERE l.name = r.lock AND l.token = r.token AND l.expires_at > clock_timestamp()
           )
    FROM slot_runs AS r
    WHERE r.name = slot_outcome.name AND r.slot <= slot_outcome.slot AND r.last_slot >= slot_outcome.slot
    ORDER BY r.run DESC LIMIT 1
$$;
