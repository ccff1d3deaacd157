"""The core decides; `_runtime` performs. This page is the protocol that the core follows.

Modules here do no I/O and start no thread. A behaviour of several steps is a flow: a generator that yields what it
needs done (`effects`) and receives the reply. Clock and randomness are injected, so the tests and the simulation run
this code without a database and without waiting.

Where to look
-------------
Flows and statements  effects, statements, replies, options, clock, schema_version
Acquire and wait      acquire, waiters, deadlocks
Grants and leases     grants, lease_state, lease_flows, holds (re-entrance), renewal,
                      keepalive_flow
Listener, presence    listener_flow, listener_failures, handshake (can a connection be a presence), presence,
                      doubtful_presences (its session is gone or silent)
Schedules             slots
Logging               outage
Intervals, patiences  timings

Authority
---------
The database decides who holds a lock. Each step of the protocol is one call of one SQL function in one transaction.
Only the database's clock ends a lease, and only the database mints tokens.

This process assumes three things and no more, each for a bounded time:

- A lease is held: until its trust window ends (`lease_state`).
- Its session is seen by other clients: until the server falls silent or the socket closes (`presence`).
- A ticket keeps its position in a queue: until the next heartbeat says otherwise (`waiters`).

If an assumption can no longer be checked in time, the core takes the safe side: unsure means lost.

Grants and tokens
-----------------
A lock is a row. A grant locks that row, mints the token, reads the clock, and writes token and deadline, in this
order. Token order is therefore grant order, for each lock name. A renewal, a release or a force-release names the
exact grant by lock and token. So a late release never frees the next holder, and a renewal never revives a lease.

Every request for a lock carries an attempt, a random UUID. A request that is sent twice finds its own grant under the
same token. So every call may be retried when a connection breaks.

The trust window
----------------
The window is counted on this process's monotonic clock, from before the request was sent. It lasts for 98 % of the
time that the database says is left. So a slow reply cannot stretch it, and clocks that differ in speed by less than
2 % cannot either. The window ends before the database's deadline: the holder knows of its loss before another client
can be granted the lock, as long as the holder's process runs.

The keep-alive renews all leases of a client in one statement, at least three times per ttl (`renewal`). A confirmed
renewal moves the window. A failed renewal is retried until the window ends. If a reply arrives after that, the lease
stays lost and the grant is given back.

     sent     reply               window ends     deadline in the database
    ──┼────────┼───────────────────────┼───────────────┼──────────────────► time
      │        └───── believed ────────┤               │
      └──────── 98 % of the time ──────┘ lost from     │ free for the next
                left at the grant        here on       │ holder from here on

Each read of a lease compares the clock with the window. No thread has to run for a lease to be lost.

The states of a lease
---------------------
                    ┌─────────► LEAVING ────────────┐     a release in the user's own transaction
                    │              │                │
                    │              ▼                ▼
    grant ───────► HELD ──────► RELEASING ─────► RELEASED
                    │              │
                    │              ▼
                    └───────────► LOST                    expired, superseded, forced or unreachable

`lease_state` draws every arrow with its event. LOST and RELEASED are final. A lease in LEAVING or RELEASING is not
believed. LEAVING returns to HELD if a later renewal shows that the user's transaction was rolled back.

The queue
---------
If a lock is held or has waiters, `acquire` takes a ticket. In one transaction it locks the queue, checks the lock
again, and inserts the ticket, so a release either precedes the check or sees the ticket. A release frees the lock for
the first ticket only and notifies that ticket's client. The woken waiter redeems its ticket. That is the grant: it
mints the token, and the trust window starts with it. No position in the queue is a grant.

A waiter costs no connection. All waiters of a client share one listener, and one heartbeat a second keeps all their
tickets. A lost notification costs at most that second, because the heartbeat also asks which tickets are first. While
another transaction keeps a lock or its queue locked, one waiter of the client asks for that lock, with growing pauses,
and the others follow in their order. The queue passes over a client that has not been heard of for three seconds, and
over a client whose presence has ended.

Presence and grace
------------------
The listener's session also carries the client's presence: a session-level advisory lock that waiters can check.
Leases are tied to it. When a process dies, its session ends, and the first waiter takes the lock after the grace
(0.15 s by default) instead of at the deadline. A process that is stopped keeps its session, so its leases end by their
ttl.

A session can also end while its process lives. Two thirds of the grace belong to the holder: it reports over another
connection that it is alive and learns which grants still stand, or it gives up the leases that are tied to that
presence. The last third separates the holder's decision from the waiter's. If the holder learns in that time that the
server ends all its sessions, it keeps its leases: a takeover needs two looks one grace apart in one incarnation of the
server, and in the next incarnation the presence does not count.

Failures
--------
Lost reply         The call is retried under the same attempt or token. If the retry fails too, the error has
                   `may_be_done`, unless the function itself has refused the call and no reply was lost before. The
                   caller then gives up what it may have been granted, at once or later through the listener.
Silent connection  A call has a time limit. A renewal gets half of what is left of the window, so that there is time
                   to retry over a new connection. A silent listener counts as a presence for 45 s; the server keeps
                   its session for 60 s.
Paused process     The window and the presence are compared with the clock and the socket at each read. The first
                   read after the pause reports the loss. Between a read and a write the process can pause again,
                   so resources must check the token (`fenced_store`).
Dead process       Its session ends, and its locks pass on after the grace. Without presence they pass on at their
                   deadlines, and its tickets after three seconds.
Server crash       Acknowledged grants are durable. Presences from before the crash no longer count, so no live
                   holder looks dead. Tickets that were lost are taken again.
Failover           An asynchronous standby may not know the newest grants. Tokens follow the server's clock, so they
                   still rise, and a fence refuses the old holder. The old holder's next renewal reports the loss.
Forced release     The database refuses the next renewal with the reason `forced`. The deadline stays, so the holder
                   is told first. With `now` the lock is free at once, and only the token protects the resource.
"""
