-- Moves the ticket of an attempt to another client, and lets it keep its position without a
-- heartbeat for `keep`, at most 5 minutes. False means that the attempt has no ticket.
--
-- It is for a waiter that waits in several requests, such as those of HTTP: between two of them no
-- process waits. While such a ticket is first, a free lock stays reserved for it. acquire() with
-- the same attempt takes the ticket over again.
CREATE OR REPLACE FUNCTION keep_ticket(name text, attempt uuid, client uuid, keep interval) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
    patience text := current_setting('lock_timeout');
    ignored text;
    moved boolean;
BEGIN
    IF keep_ticket.client IS NULL OR (date_part('epoch', keep_ticket.keep) BETWEEN 0 AND 300) IS NOT TRUE THEN
        RAISE EXCEPTION 'keep_ticket needs a client and a time of 0 to 300 seconds; got % and %.',
            coalesce(keep_ticket.client::text, 'none'), coalesce(keep_ticket.keep::text, 'none')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    ready := commit_asynchronously();
    -- A ticket that is being redeemed is locked until that grant is on disk.
    ignored := set_config('lock_timeout', '500ms', true);
    -- A ticket counts for two seconds without a look at its client. For a shorter time it is aged.
    UPDATE lock_tickets AS t
    SET client = keep_ticket.client,
        since = CASE
            WHEN date_part('epoch', keep_ticket.keep) < 2 THEN least(t.since, clock_timestamp() - interval '2 seconds')
            ELSE t.since
        END
    WHERE t.attempt = keep_ticket.attempt AND t.name = keep_ticket.name;
    moved := FOUND;
    IF moved THEN
        INSERT INTO lock_clients AS c (client, seen_until)
        VALUES (keep_ticket.client, clock_timestamp() + make_interval(secs => date_part('epoch', keep_ticket.keep)))
        ON CONFLICT (client) DO UPDATE SET seen_until = greatest(c.seen_until, excluded.seen_until);
    END IF;
    ignored := set_config('lock_timeout', patience, true);
    RETURN moved;
END
$$;
