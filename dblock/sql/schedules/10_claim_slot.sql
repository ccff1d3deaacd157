-- Decides about the newest slots of a schedule, and grants the lock of the run if the caller has to
-- run one. Registers the schedule, or changes its definition, if that is necessary.
--
-- Give exactly one of `every`, `cron` (with `zone`) and `delay`. `decision` is one of:
--
--   run      Run the slot: the grant is in the reply. Report the end with end_slot().
--   queued   The slot starts when the active run has ended. Ask again soon, with the same attempt.
--   plan     The slots of the cron expression after `planned_until` are not known. Compute them and
--            call again with `plan` and `plan_from => planned_until`.
--   running  A run is active: it runs this slot, or the slot has to wait until that run has ended.
--   skipped  The slot was due while a run was active, and is not run.
--   paused   An operator has paused the schedule.
--   none     Nothing is due: every slot up to now is decided.
--
-- The slot, its grant and its row in the ledger are decided in one transaction, by the clock of
-- this server, while the row of the schedule is locked. So a slot is decided once, and a claimer
-- that dies at any moment leaves either nothing or a run whose lock expires. A caller for which
-- nothing is to be decided locks no row and writes nothing.
--
-- `attempt` identifies this request. If its reply is lost, a retry finds the grant of the first
-- call. `slot` is the slot of the run, or the newest decided slot. `next_slot` is the next one, and
-- `wait` the seconds until a call may find something else.
--
-- A run whose lease is over and that has not reported its end is recorded as `died` here. With
-- delivery at-least-once the same slot runs again, under a new token.
CREATE OR REPLACE FUNCTION claim_slot(
    name text,
    every interval DEFAULT NULL,
    cron text DEFAULT NULL,
    zone text DEFAULT NULL,
    delay interval DEFAULT NULL,
    catch_up text DEFAULT 'none',
    overlap text DEFAULT 'skip',
    delivery text DEFAULT 'at-most-once',
    grace interval DEFAULT NULL,
    at_least interval DEFAULT NULL,
    ttl interval DEFAULT '30 seconds',
    holder text DEFAULT NULL,
    attempt uuid DEFAULT NULL,
    presence uuid DEFAULT NULL,
    plan timestamptz[] DEFAULT NULL,
    plan_from timestamptz DEFAULT NULL,
    OUT decision text,
    OUT lock text,
    OUT token bigint,
    OUT expires_at timestamptz,
    OUT remaining double precision,
    OUT slot timestamptz,
    OUT number integer,
    OUT next_slot timestamptz,
    OUT wait double precision,
    OUT asked_at timestamptz,
    OUT planned_until timestamptz
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    ready boolean;
    ignored text;
    durability CONSTANT text := current_setting('synchronous_commit');
    s schedules;
    wanted schedules;
    is_new boolean := false;
    ended timestamptz;
    r slot_runs;
    active slot_runs;
    again slot_runs;
    queued slot_runs;
    -- Slots up to this moment were due while a run was active.
    busy_until timestamptz;
    blocked boolean;
    due record;
    overlapped record;
    late record;
    earlier record;
    first_waiting timestamptz;
    candidate timestamptz;
    -- The candidate, or else the slot of a run that an operator has asked for.
    chosen timestamptz;
    reply record;
BEGIN
    ready := check_schedule(
        claim_slot.name, claim_slot.every, claim_slot.cron, claim_slot.zone, claim_slot.delay, claim_slot.catch_up,
        claim_slot.overlap, claim_slot.delivery, claim_slot.grace, claim_slot.at_least
    ) AND check_request('once:' || claim_slot.name, claim_slot.ttl, claim_slot.holder);
    wanted.name := claim_slot.name;
    wanted.kind := CASE
        WHEN claim_slot.every IS NOT NULL THEN 'every' WHEN claim_slot.cron IS NOT NULL THEN 'cron' ELSE 'delay'
    END;
    wanted.expression := claim_slot.cron;
    wanted.zone := CASE WHEN claim_slot.cron IS NOT NULL THEN claim_slot.zone END;
    -- An interval of a day and one of 24 hours are the same.
    wanted.period := make_interval(secs => date_part('epoch', coalesce(claim_slot.every, claim_slot.delay)));
    wanted.catch_up := claim_slot.catch_up;
    wanted.overlap := claim_slot.overlap;
    wanted.delivery := claim_slot.delivery;
    wanted.grace := make_interval(secs => date_part('epoch', claim_slot.grace));
    wanted.at_least := make_interval(secs => date_part('epoch', claim_slot.at_least));

    -- Without a lock first: usually there is nothing to decide.
    SELECT * INTO s FROM schedules AS o WHERE o.name = claim_slot.name;
    IF FOUND AND claim_slot.plan IS NULL AND sees_latest_commits() AND s.requested_at IS NULL
        AND same_slots(s, wanted) AND same_rules(s, wanted)
    THEN
        SELECT l.decision, l.slot, l.next_slot, l.wait, l.asked_at INTO decision, slot, next_slot, wait, asked_at
        FROM look_at_schedule(s, claim_slot.attempt) AS l;
        IF decision IS NOT NULL THEN
            RETURN;
        END IF;
    END IF;

    -- A row lock alone need not reach the disk. What is decided below is durable.
    ready := commit_asynchronously();
    LOOP
        SELECT * INTO s FROM schedules AS o WHERE o.name = claim_slot.name FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO schedules AS o (name, kind, catch_up, overlap, delivery, since)
        VALUES (wanted.name, wanted.kind, wanted.catch_up, wanted.overlap, wanted.delivery, clock_timestamp())
        ON CONFLICT DO NOTHING
        RETURNING o.* INTO s;
        is_new := FOUND;
        EXIT WHEN is_new;
    END LOOP;
    asked_at := clock_timestamp();

    -- The caller's own earlier request, whose reply was lost.
    SELECT * INTO r FROM slot_runs AS o
    WHERE o.name = claim_slot.name AND o.attempt = claim_slot.attempt AND o.outcome IS NULL;
    IF FOUND THEN
        SELECT l.expires_at, date_part('epoch', l.expires_at) - date_part('epoch', asked_at)
        INTO expires_at, remaining
        FROM distributed_locks AS l WHERE l.name = r.lock AND l.token = r.token AND l.expires_at > asked_at;
        IF FOUND THEN
            decision := 'run';
            lock := r.lock;
            token := r.token;
            slot := r.slot;
            number := r.number;
            -- This write makes the retry wait for a durable commit of its own.
            ready := commit_durably();
            UPDATE slot_runs AS o SET attempt = o.attempt WHERE o.run = r.run;
            RETURN;
        END IF;
    END IF;

    ignored := set_config(
        'synchronous_commit', CASE WHEN durability IN ('on', 'remote_apply') THEN durability ELSE 'on' END, true
    );
    IF is_new OR NOT same_slots(s, wanted) OR NOT same_rules(s, wanted) THEN
        s := define_schedule(s, wanted, is_new, claim_slot.holder, asked_at);
    END IF;

    IF s.kind = 'cron' AND claim_slot.plan_from = s.planned_until THEN
        s := extend_plan(s, claim_slot.plan, asked_at);
    END IF;
    IF NOT plan_suffices(s, asked_at) THEN
        decision := 'plan';
        planned_until := s.planned_until;
        RETURN;
    END IF;
    IF s.paused_at IS NOT NULL AND s.requested_at IS NULL THEN
        decision := 'paused';
        slot := s.decided_until;
        RETURN;
    END IF;

    -- Find the runs that are active, and record the ends of those that died.
    FOR r IN SELECT * FROM slot_runs AS o
        WHERE o.name = claim_slot.name AND (o.outcome IS NULL OR o.outcome = 'queued') ORDER BY o.run
    LOOP
        IF r.outcome = 'queued' THEN
            queued := r;
            CONTINUE;
        END IF;
        -- A run whose lease expired ended then, and not when it was found.
        ended := (
            SELECT CASE WHEN l.expires_at = '-infinity' THEN l.released_at ELSE l.expires_at END
            FROM distributed_locks AS l WHERE l.name = r.lock AND l.token = r.token
        );
        ended := greatest(least(coalesce(ended, r.claimed_at), asked_at), r.claimed_at);
        IF again.run IS NOT NULL OR NOT run_is_over(r.lock, r.token) THEN
            active := r;
        ELSIF s.delivery = 'at-least-once' AND s.paused_at IS NOT NULL THEN
            -- The slot runs again after the pause.
            CONTINUE;
        ELSIF s.delivery = 'at-least-once' THEN
            again := r;
            again.ended_at := ended;
        ELSE
            UPDATE slot_runs AS o SET outcome = 'died', ended_at = ended WHERE o.run = r.run;
            UPDATE schedules AS o SET last_ended_at = greatest(o.last_ended_at, ended)
            WHERE o.name = claim_slot.name
            RETURNING o.last_ended_at INTO s.last_ended_at;
        END IF;
    END LOOP;
    blocked := active.run IS NOT NULL AND s.overlap <> 'allow'
        OR coalesce(asked_at < s.last_claimed_at + s.at_least, false);
    busy_until := CASE
        WHEN s.overlap = 'allow' OR s.catch_up = 'all' OR s.kind = 'delay' THEN '-infinity'
        WHEN blocked THEN asked_at
        ELSE least(coalesce(greatest(s.last_ended_at, s.last_claimed_at + s.at_least), '-infinity'), asked_at)
    END;
    due := slots_between(s, undecided_after(s), asked_at);
    overlapped := slots_between(s, undecided_after(s), busy_until);
    late := slots_between(s, greatest(undecided_after(s), busy_until), asked_at);

    -- Choose the slot to run, if there is one. Nothing is recorded before its lock is granted.
    first_waiting := CASE WHEN s.overlap = 'queue' THEN coalesce(queued.slot, overlapped.first_slot) END;
    IF again.run IS NOT NULL THEN
        candidate := again.slot;
    ELSIF blocked THEN
        candidate := NULL;
    ELSIF first_waiting IS NOT NULL AND (
        s.catch_up <> 'none'
        OR asked_at <= greatest(first_waiting, s.last_ended_at, s.last_claimed_at + s.at_least)
            + slot_grace(s, first_waiting)
    ) THEN
        candidate := first_waiting;
    ELSIF due.slots > 0 AND (s.kind = 'delay' OR s.catch_up = 'all') THEN
        candidate := due.first_slot;
    ELSIF late.slots > 0 AND (s.catch_up <> 'none' OR asked_at <= late.last_slot + slot_grace(s, late.last_slot)) THEN
        candidate := late.last_slot;
    END IF;
    IF s.paused_at IS NOT NULL THEN
        candidate := NULL;
    END IF;
    chosen := candidate;
    IF chosen IS NULL AND s.requested_at IS NOT NULL AND NOT blocked THEN
        chosen := s.requested_at;
    END IF;
    IF chosen IS NOT NULL THEN
        lock := run_lock(claim_slot.name, s.overlap, chosen);
        -- Wait for a renewal of the last run that is under way, and for a moment for a proof.
        ignored := current_setting('lock_timeout');
        BEGIN
            PERFORM set_config('lock_timeout', '1s', true);
            PERFORM 1 FROM distributed_locks AS l WHERE l.name = claim_slot.lock FOR UPDATE;
            PERFORM set_config('lock_timeout', ignored, true);
        EXCEPTION WHEN lock_not_available THEN
            -- Then the lock is not granted.
        END;
        reply := try_acquire(
            lock, claim_slot.ttl, coalesce(claim_slot.holder, describe_session()),
            jsonb_build_object('schedule', left(claim_slot.name, 200), 'slot', chosen),
            claim_slot.attempt, presence => claim_slot.presence, fair => false
        );
        IF NOT reply.granted THEN
            -- Another client holds the lock, or has proved its lease in a transaction that is open.
            decision := 'running';
            lock := NULL;
            slot := s.decided_until;
            wait := reply.remaining;
            RETURN;
        END IF;
    END IF;

    -- Record the slots that do not run.
    IF again.run IS NULL AND s.catch_up <> 'all' AND s.kind <> 'delay' AND s.paused_at IS NULL THEN
        IF candidate IS NOT NULL AND candidate = first_waiting AND queued.run IS NULL THEN
            -- The first slot that was due during the last run starts now, and the others do not.
            earlier := slots_between(s, first_waiting, busy_until);
            PERFORM record_unrun_slots(
                s, 'skipped', earlier.slots, earlier.first_slot, earlier.last_slot
            );
        ELSIF s.overlap = 'queue' AND blocked AND queued.run IS NULL AND overlapped.slots > 0 THEN
            INSERT INTO slot_runs (name, slot, last_slot, slots, number, holder, attempt, outcome, claimed_at)
            VALUES (
                claim_slot.name, first_waiting, first_waiting, 1, 0, claim_slot.holder, claim_slot.attempt, 'queued',
                asked_at
            )
            RETURNING * INTO queued;
            earlier := slots_between(s, first_waiting, busy_until);
            PERFORM record_unrun_slots(
                s, 'skipped', earlier.slots, earlier.first_slot, earlier.last_slot
            );
        ELSE
            PERFORM record_unrun_slots(
                s, 'skipped', overlapped.slots, overlapped.first_slot, overlapped.last_slot
            );
            IF queued.run IS NOT NULL AND NOT blocked AND candidate IS DISTINCT FROM first_waiting THEN
                -- Its caller has gone, and it is too late.
                UPDATE slot_runs AS o SET outcome = 'missed', ended_at = asked_at WHERE o.run = queued.run;
            END IF;
        END IF;
        s.decided_until := greatest(s.decided_until, overlapped.last_slot);
        IF late.slots > 0 AND candidate IS NOT NULL AND candidate = first_waiting AND s.overlap = 'queue' THEN
            -- A run is active from now on, so the first of these waits for its end.
            INSERT INTO slot_runs (name, slot, last_slot, slots, number, outcome, claimed_at)
            VALUES (claim_slot.name, late.first_slot, late.first_slot, 1, 0, 'queued', asked_at);
            earlier := slots_between(s, late.first_slot, asked_at);
            PERFORM record_unrun_slots(
                s, 'skipped', earlier.slots, earlier.first_slot, earlier.last_slot
            );
        ELSIF late.slots > 0 THEN
            earlier := slots_between(
                s, greatest(undecided_after(s), busy_until),
                CASE WHEN candidate IS NULL THEN asked_at ELSE candidate - interval '1 microsecond' END
            );
            PERFORM record_unrun_slots(s, 'missed', earlier.slots, earlier.first_slot, earlier.last_slot);
        END IF;
        s.decided_until := greatest(s.decided_until, late.last_slot);
    ELSIF candidate IS NOT NULL AND again.run IS NULL THEN
        s.decided_until := greatest(s.decided_until, candidate);
    END IF;

    IF chosen IS NULL THEN
        UPDATE schedules AS o SET decided_until = s.decided_until
        WHERE o.name = claim_slot.name AND o.decided_until IS DISTINCT FROM s.decided_until;
        decision := CASE
            WHEN queued.attempt = claim_slot.attempt AND blocked THEN 'queued'
            WHEN overlapped.slots > 0 THEN 'skipped'
            WHEN blocked THEN 'running'
            ELSE 'none'
        END;
        slot := CASE
            WHEN decision = 'queued' THEN queued.slot
            WHEN s.kind = 'delay' THEN coalesce(active.slot, s.decided_until)
            ELSE s.decided_until
        END;
        next_slot := slot_after(s, greatest(asked_at, undecided_after(s)));
        wait := date_part('epoch', next_slot) - date_part('epoch', asked_at);
        RETURN;
    END IF;

    decision := 'run';
    token := reply.token;
    expires_at := reply.expires_at;
    remaining := reply.remaining;
    slot := chosen;
    number := coalesce(again.number, 0) + 1;
    IF again.run IS NOT NULL THEN
        UPDATE slot_runs AS o SET outcome = 'died', ended_at = again.ended_at WHERE o.run = again.run;
    END IF;
    IF queued.run IS NOT NULL AND candidate = queued.slot AND again.run IS NULL THEN
        UPDATE slot_runs AS o
        SET outcome = NULL, number = 1, lock = claim_slot.lock, token = reply.token,
            holder = coalesce(claim_slot.holder, describe_session()), attempt = claim_slot.attempt,
            claimed_at = asked_at
        WHERE o.run = queued.run;
    ELSE
        INSERT INTO slot_runs (name, slot, last_slot, slots, number, lock, token, holder, attempt, claimed_at)
        VALUES (
            claim_slot.name, chosen, chosen, 1, claim_slot.number, claim_slot.lock, reply.token,
            coalesce(claim_slot.holder, describe_session()), claim_slot.attempt, asked_at
        );
    END IF;
    UPDATE schedules AS o
    SET decided_until = s.decided_until, last_claimed_at = asked_at,
        last_ended_at = greatest(o.last_ended_at, again.ended_at),
        requested_at = CASE WHEN candidate IS NULL THEN NULL ELSE o.requested_at END
    WHERE o.name = claim_slot.name;
    -- The ledger keeps the newest five hundred rows of each schedule, and every run that is active.
    DELETE FROM slot_runs AS o
    WHERE o.name = claim_slot.name AND o.outcome IS NOT NULL AND o.outcome <> 'queued' AND o.run < (
        SELECT p.run FROM slot_runs AS p WHERE p.name = claim_slot.name ORDER BY p.run DESC OFFSET 499 LIMIT 1
    );
    next_slot := slot_after(s, greatest(asked_at, s.decided_until));
END
$$;
