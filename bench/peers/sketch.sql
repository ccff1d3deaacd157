CREATE SCHEMA sketch;

CREATE TABLE sketch.locks (
    name text PRIMARY KEY,
    token bigint,
    held boolean NOT NULL DEFAULT false,
    -- The ticket that the lock is kept for while it is free.
    reserved bigint
) WITH (fillfactor = 50);

CREATE TABLE sketch.tickets (
    name text,
    number bigint GENERATED ALWAYS AS IDENTITY,
    channel text NOT NULL,
    PRIMARY KEY (name, number)
);

CREATE SEQUENCE sketch.tokens;

-- Grants the lock if it is free and not reserved, else leaves a ticket.
CREATE FUNCTION sketch.acquire(name text, channel text, OUT token bigint, OUT ticket bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    UPDATE sketch.locks AS l SET held = true, token = nextval('sketch.tokens')
    WHERE l.name = acquire.name AND NOT l.held AND l.reserved IS NULL
    RETURNING l.token INTO token;
    IF FOUND THEN
        RETURN;
    END IF;
    INSERT INTO sketch.locks (name) VALUES (acquire.name) ON CONFLICT DO NOTHING;
    -- Looks again under the row's lock, so that no release comes between the look and the ticket.
    PERFORM FROM sketch.locks AS l WHERE l.name = acquire.name FOR UPDATE;
    UPDATE sketch.locks AS l SET held = true, token = nextval('sketch.tokens')
    WHERE l.name = acquire.name AND NOT l.held AND l.reserved IS NULL
    RETURNING l.token INTO token;
    IF NOT FOUND THEN
        PERFORM set_config('synchronous_commit', 'off', true);
        INSERT INTO sketch.tickets (name, channel) VALUES (acquire.name, acquire.channel)
        RETURNING number INTO ticket;
    END IF;
END
$$;

-- Redeems the ticket that the lock is reserved for.
CREATE FUNCTION sketch.claim(name text, ticket bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    minted bigint;
BEGIN
    UPDATE sketch.locks AS l SET held = true, reserved = NULL, token = nextval('sketch.tokens')
    WHERE l.name = claim.name AND l.reserved = claim.ticket
    RETURNING l.token INTO minted;
    DELETE FROM sketch.tickets AS t WHERE t.name = claim.name AND t.number = claim.ticket;
    RETURN minted;
END
$$;

-- Frees the lock, reserves it for the first ticket and notifies it. Commits asynchronously.
CREATE FUNCTION sketch.release(name text, token bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    next bigint;
    channel text;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM FROM sketch.locks AS l WHERE l.name = release.name FOR UPDATE;
    SELECT t.number, t.channel INTO next, channel FROM sketch.tickets AS t
    WHERE t.name = release.name ORDER BY t.number LIMIT 1;
    UPDATE sketch.locks AS l SET held = false, reserved = next
    WHERE l.name = release.name AND l.token = release.token;
    IF next IS NOT NULL THEN
        PERFORM pg_notify(channel, next::text);
    END IF;
    RETURN true;
END
$$;
