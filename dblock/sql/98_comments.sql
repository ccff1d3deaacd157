-- Describes each public function where an administrator looks: \df+ in psql, or a database browser.
DO $$
DECLARE
    described CONSTANT jsonb := $json${
"try_acquire": "Grants the lock if it is free and its queue is empty, and returns the token. Never waits for a holder. With `ticket`, claims the lock for a waiter whose turn it is.",
"acquire": "Grants the lock if it is this attempt's turn, else leaves a ticket in its queue, first come, first served. Needs `attempt` and `client`.",
"heartbeat": "Reports that a waiting client is alive, and returns which of its attempts are first in their queue. Call it every second while waiting.",
"leave_queue": "Gives up the tickets of a client, its heartbeat and its presence. Locks that it holds stay held.",
"abandon": "Gives back the grant and the ticket of an attempt, and wakes the next waiter. False: there was nothing to give back.",
"queue": "Returns the live waiters of a lock in order, as JSON.",
"renew": "Extends the lease of this exact grant. No row: the lease is lost, stop writing.",
"renew_all": "Extends many leases in one statement, each under its exact token. `failed` has the positions of those that are not extended.",
"release": "Frees the lock if this exact grant holds it, and wakes the first waiter. False: the grant does not hold it any more.",
"release_all": "Frees many locks in one statement, each only if its exact grant holds it. `busy` has the positions to retry.",
"register_presence": "Makes this session a presence: locks that are tied to it go to other clients after `grace` once the session has ended. Not through a pooler.",
"withdraw_presence": "Reports that a process is alive although its presence has ended. `lost` has the positions of the grants that it does not hold any more.",
"assert_held": "Proves in your transaction that this exact grant holds the lock. No other client is granted the lock until the transaction ends.",
"migration_state": "Returns what the ledger knows about a migration, without a lock: whether this version is done, and how often it has failed.",
"begin_migration": "Records that the holder of the lock begins a migration, or says why it must not: `decision` is run, done, failed or lost.",
"note_revision": "Records how far a run of a migration has come. False: the run has ended.",
"end_migration": "Records how a run of a migration ended: succeeded, failed, blocked, killed or lost. Returns what was recorded.",
"migration_sessions": "Returns the sessions of a migration. End those that are `stale` with pg_terminate_backend() before you run anything.",
"retry_migration": "Lets a version that has failed run again, and returns how many failures it clears.",
"discard_restored_grant": "Frees the lock of a migration that was running when this database was dumped elsewhere.",
"list_migrations": "Returns each migration: its phase, holder, sessions, waiters and newest runs.",
"invalid_indexes": "Returns the indexes that a failed CREATE INDEX CONCURRENTLY has left behind.",
"list_guards": "Returns the schemas in which DDL needs a migration that holds the lock, and the names of these migrations.",
"election_leader": "Returns the leader of an election. No token: there is none.",
"list_terms": "Returns the terms of an election after the token `since`, in order, as JSON.",
"list_candidates": "Returns the live candidates of an election in queue order.",
"join_election": "Registers a candidate of an election, before it waits for the lock `election:NAME`.",
"leave_election": "Removes a candidate of an election that does not wait any more.",
"begin_term": "Begins a term of the candidate that was granted the lock `election:NAME`: replies lead, yield or lost.",
"end_term": "Ends a term and releases its lock. False: the token does not hold the lock any more.",
"publish_value": "Replaces the value that a leader publishes. False: the token does not lead.",
"transfer_term": "Asks a leader to hand its term over to a candidate: replies asked, absent, outranked, leads or over.",
"term_demand": "Returns why a leader should end its term: transfer, priority or over. NULL: no reason.",
"claim_slot": "Decides about the due slots of a schedule, and grants the lock of the run if the caller has to run one: `decision` is run, queued, plan, running, skipped, paused or none.",
"end_slot": "Records how a run of a schedule ended, and releases its lock. NULL: the grant does not hold the lock any more, and nothing was recorded.",
"slot_outcome": "Returns what the ledger knows about a slot of a schedule. No row: the slot is not decided.",
"list_schedules": "Returns each schedule: its next slot, whether it is overdue, what runs, and its newest runs.",
"list_schedule_events": "Returns what operators did to one schedule or to all, and changes of definitions, newest first.",
"pause_schedule": "Pauses a schedule: no slot starts until resume_schedule(). Records actor and reason.",
"resume_schedule": "Ends the pause of a schedule. Slots that were due during the pause are not run.",
"run_schedule": "Asks for one run outside of the schedule. The next host that calls claim_slot() runs it.",
"delete_schedule": "Deletes a schedule that is not used any more, with its ledger. Its events stay.",
"holder": "Returns the current holder of a lock. No row: the lock is free.",
"schema_revision": "Returns the installed revision of this schema.",
"installation": "Returns the UUID of this installation, to tell it from one in another database.",
"list_locks": "Returns locks by name or by LIKE pattern: those that are held or waited for, or with `include_free` all.",
"list_waiters": "Returns the live waiters of one lock or of all, in queue order.",
"list_history": "Returns the events of one lock or of all, newest first.",
"grants_are_recorded": "Returns whether the history also has every grant and release.",
"force_release": "Takes a lock from one exact grant, and records actor and reason. The lock is free when its holder releases it or its deadline passes; with `now` at once.",
"wake_queue": "Wakes the first waiter of a free lock. Call it in its own transaction after force_release with `now`.",
"raise_tokens": "For the owner: makes every later token higher than `above`, for example after a restore. Never lowers tokens.",
"show_tokens": "For the owner: returns the highest token that was issued, and by how many seconds it is behind the clock.",
"record_grants": "For the owner: starts or stops recording every grant and release in the history.",
"guard_schema": "For the owner: refuses DDL in a schema unless it runs in a migration with one of these names that holds its lock. Creates event triggers.",
"unguard_schema": "For the owner: allows DDL in a schema again, or with NULL in all. Returns the event triggers that this role may not drop.",
"reap": "For the owner: deletes the rows of locks that have been free for longer than `idle`, and returns how many."
}$json$;
    thing record;
BEGIN
    FOR thing IN
        SELECT p.oid::regprocedure AS name, described ->> p.proname AS text
        FROM pg_proc AS p
        WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND described ? p.proname
    LOOP
        EXECUTE format('COMMENT ON FUNCTION %s IS %L', thing.name, thing.text);
    END LOOP;
END
$$;
