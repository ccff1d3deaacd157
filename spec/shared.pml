/* The protocol of one shared lock, which spin searches exhaustively: a read-write lock, or with PERMITS=k a semaphore.
 * See README.md.
 *
 * As in dblock.pml, each SQL function is one atomic step, because it holds the row of the lock's head while it decides.
 * Requests and replies are in transit for any time, and time passes for the whole model at once.
 *
 * Each grant is a share, a row of its own with its own token and deadline. Share 0 is the writer's and the others are
 * those of readers. The shares of a semaphore are its permits. A free share is granted again to another client, so a
 * share is known by its number, and a grant by its number and its token.
 *
 * Each client wants one grant. One reply may be lost, the client renews once, and a writer may become a reader once. So
 * every run ends, and "every live waiter is served" means that no run ends before every client is served or dead.
 *
 * A waiter learns that it can be granted the lock by a notification, or by itself: with a deadline or a heartbeat. The
 * model demands more than that it learns it. Where a client freed a share, the notification must be there at once.
 *
 * -DBUG_... seeds one bug, and the search must fail. -DCAN_... states that something is impossible, and the search
 * must fail too, because it is possible.
 */

#ifndef N
#define N 3
#endif
#ifndef TTL
#define TTL 2
#endif
#ifdef PERMITS
#define SHARES PERMITS
#else
#define SHARES (N + 1)
#endif

/* What a client wants. */
#define READ 0
#define WRITE 1
#define PERMIT 2

/* The states of a client. */
#define THINKS 0        /* it does not want the lock yet */
#define ASKS 1          /* its request is in transit */
#define ANSWERED 2      /* it was granted a share, and the reply is in transit */
#define WAITS 3         /* it has a ticket, as far as it knows */
#define HOLDS 4         /* it has a lease, which it may or may not trust */
#define DONE 5          /* it has released, left or died */

/* The states of a renewal or a downgrade. */
#define SENT 1
#define LANDED 2
#define REFUSED 3
#define ANNOUNCES 4     /* a downgrade whose reply has arrived: wake_queue is in transit */

#define NONE 255

/* The database. The queue is in the clients' positions. */
byte share_token[SHARES];
byte share_left[SHARES];        /* ticks until its deadline, 0: free */
byte share_of[SHARES];          /* the client whose attempt it was granted to, from 1 */
byte sequence = 0;
#ifdef PERMITS
byte permits = PERMITS;
#endif

/* What the database knows of the clients. */
byte place[N];                  /* position in the queue, from 1, 0: none */
byte proof[N];                  /* the share that its open transaction has proved, from 1, 0: none */
/* What the clients know themselves. */
byte at[N];
byte mode[N];
byte share[N];                  /* the share of its lease */
byte under[N];                  /* the token of its lease */
byte trust[N];                  /* ticks for which it may trust its lease */
byte flight[N];                 /* ticks of trust that a request in transit would bring */
bool again[N];                  /* a reply was lost */
byte renewing[N];
bool renewed[N];
byte downgrading[N];
bool proved[N];                 /* it has begun such a transaction */
bool dead[N];
/* What is in transit to them. */
bool woken[N];
/* Seeded bugs. */
#ifdef BUG_TOKEN_EARLY
byte early[N];
#endif
#ifdef BUG_HEAD_UNLOCKED
byte decided[N];
#endif

/* What follows from the state: see settle. */
bool turn[N];                   /* the next request of this waiter is granted */
bool ticks = false;             /* something depends on time */
byte orphan = 0;               /* a client that is dead and has a ticket, from 1 */

/* Only for the checks. */
bool notices = false;           /* the waiters have to find out by themselves, at a deadline or with a heartbeat */
bool between[N];                /* its write lease is over, and its read lease has not begun */
byte newest = 0;                /* the highest token granted */
#if defined(CRASHES) || defined(LEAVES)
bool calm = false;              /* no client dies or leaves any more, so a stuck waiter stays stuck */
#define stormy (!calm)
#endif

/* Scratch variables of a step, which are not part of the state. */
hidden byte j, k, m, held, ahead, vacant, blocked, first, writer, number, ok, readers, writers;

#include "canonical_shared.pml"

#define is_free(s) (share_left[s] == 0)
#define excludes(wanted, s) (wanted != READ || s == 0)

#if defined(BUG_DOWNGRADE_TRUSTED)
#define is_leaving(i) false
#else
/* While its downgrade is in transit, a client trusts neither lease. */
#define is_leaving(i) (downgrading[i] == SENT || downgrading[i] == LANDED)
#endif
#define believes(i) (at[i] == HOLDS && !dead[i] && trust[i] > 0 && !is_leaving(i))
/* A transaction that has proved a lease with assert_held relies on it until it ends. */
#define relies(i) (believes(i) || proof[i] > 0)
#define relies_as_writer(i) ((believes(i) && mode[i] == WRITE) || proof[i] == 1)

/* A writer is alone, and no more permits are used than there are. */
inline check_exclusion()
{
    readers = 0; writers = 0;
    for (k : 0 .. N - 1) {
        if
        :: !relies(k)
#ifdef PERMITS
        :: relies(k) -> readers++
#else
        :: relies(k) && relies_as_writer(k) -> writers++
        :: relies(k) && !relies_as_writer(k) -> readers++
#endif
        fi
    };
#ifdef PERMITS
    assert(readers <= PERMITS);
#ifdef CAN_USE_ALL_PERMITS
    assert(readers < PERMITS);
#endif
#else
    assert(writers == 0 || writers + readers == 1);
#ifdef CAN_READ_TOGETHER
    assert(readers <= 1);
#endif
#endif
}

inline leave_queue(who)
{
    for (k : 0 .. N - 1) {
        if
        :: place[who] > 0 && place[k] > place[who] -> place[k]--
        :: else
        fi
    };
    place[who] = 0
}

/* look_at_shares: how many shares are held that exclude a grant in this mode. */
inline count_held(wanted)
{
    held = 0;
    for (k : 0 .. SHARES - 1) { held = held + (share_left[k] > 0 && excludes(wanted, k) -> 1 : 0) }
}

/* live_tickets: the waiters ahead, of which only writers concern a reader. */
inline count_ahead(i)
{
    ahead = 0;
    for (k : 0 .. N - 1) {
        if
        :: k != i && place[k] > 0 && (place[i] == 0 || place[k] < place[i]) && (mode[i] != READ || mode[k] == WRITE) ->
            ahead++
        :: else
        fi
    }
}

/* lock_free_shares: a free share may be proved in an open transaction. */
inline count_blocked(wanted)
{
    blocked = 0;
    for (k : 0 .. N - 1) {
#ifdef BUG_PROVED_IGNORED
        if
        :: proof[k] == 1 && wanted == WRITE -> blocked++             /* only its own share */
        :: else
        fi
#else
        if
        :: proof[k] > 0 && excludes(wanted, proof[k] - 1) -> blocked++
        :: else
        fi
#endif
    }
}

/* lowest_free_share, among those that no open transaction has proved. */
inline find_share(wanted)
{
    number = NONE;
    for (k : 0 .. SHARES - 1) {
        ok = share_left[k] == 0;
        for (m : 0 .. N - 1) { ok = ok && proof[m] != k + 1 };
#ifdef PERMITS
        ok = ok && k < permits;
#else
        ok = ok && (wanted == WRITE -> k == 0 : k > 0);
#endif
        if
        :: ok && number == NONE -> number = k
        :: else
        fi
    }
}

/* Whether a request is granted now: `ok`, and the share in `number`. */
inline decide(i)
{
    count_held(mode[i]);
    count_ahead(i);
    count_blocked(mode[i]);
    find_share(mode[i]);
#ifdef PERMITS
    vacant = (held < permits -> permits - held : 0);
    ok = ahead < vacant && number != NONE
#else
    ok = held == 0 && ahead == 0 && blocked == 0 && number != NONE
#endif
}

#ifdef BUG_TOKEN_EARLY
#define token_of(i) early[i]
#else
#define token_of(i) sequence
#endif

/* grant_share: the token is minted while the head is locked, after the last check. */
inline grant(i, s)
{
    for (k : 0 .. SHARES - 1) { assert(share_of[k] != i + 1 || is_free(k)) };       /* one grant for one attempt */
#ifndef BUG_TOKEN_EARLY
    sequence++;
#endif
    /* Truth 1: token order is grant order. */
    assert(token_of(i) > newest);
    newest = token_of(i);
    share_token[s] = newest; share_left[s] = TTL; share_of[s] = i + 1
}

/* Truth 7: a reader overtakes no writer, a writer no waiter, a permit no more waiters than are served with it. */
inline check_turn(i)
{
    count_held(mode[i]);
    count_ahead(i);
#ifdef PERMITS
    assert(held < permits);
    assert(ahead < permits - held);
#else
    assert(ahead == 0);
#endif
    /* No writer enters while another one becomes a reader. */
    for (k : 0 .. N - 1) { assert(!between[k] || mode[i] != WRITE) }
}

inline answer(i, s)
{
    woken[i] = false; at[i] = ANSWERED; share[i] = s; under[i] = share_token[s]
}

inline grant_in_turn(i)
{
    m = number;
    check_turn(i);
    grant(i, m);
    leave_queue(i);
    answer(i, m)
}

/* The share that this attempt has been granted: `number`. */
inline find_own(i, from)
{
    number = NONE;
    for (k : from .. SHARES - 1) {
        if
        :: share_of[k] == i + 1 && share_left[k] > 0 -> number = k
        :: else
        fi
    }
}

/* acquire_shared: the grant of an earlier request, a share if it is this client's turn, else a ticket. */
inline acquire(i)
{
#ifdef BUG_GRANTED_TWICE
    number = NONE;
#else
    find_own(i, 0);
#endif
    if
    :: number != NONE ->
#ifdef CAN_FIND_ITS_GRANT
        assert(false);
#endif
        flight[i] = (flight[i] < share_left[number] -> flight[i] : share_left[number]);
        leave_queue(i);
        answer(i, number)
    :: else ->
        decide(i);
#ifdef BUG_READERS_OVERTAKE
        ok = ok || (mode[i] == READ && held == 0 && blocked == 0);
#endif
#ifdef BUG_WRITER_LOOKS_AT_ITS_SHARE
        ok = ok || (mode[i] == WRITE && is_free(0) && ahead == 0);
#endif
#ifdef BUG_PERMITS_OVERTAKE
        ok = ok || (held < permits && number != NONE);
#endif
#ifdef BUG_SHRINKING_IGNORED
        find_any_share();
        ok = ok || (number != NONE && ahead == 0);
#endif
        if
        :: ok -> grant_in_turn(i)
        :: else ->
#ifdef CAN_KEEP_A_READER_OUT
            /* A reader waits though only readers hold the lock. */
            assert(!(mode[i] == READ && held == 0 && place[i] == 0));
#endif
            ahead = 0;
            for (k : 0 .. N - 1) { ahead = ahead + (place[k] > 0 -> 1 : 0) };
            if
            :: place[i] == 0 -> place[i] = ahead + 1
            :: else
            fi;
            at[i] = WAITS; flight[i] = 0
        fi
    fi
}

#ifdef BUG_SHRINKING_IGNORED
inline find_any_share()
{
    number = NONE;
    for (k : 0 .. SHARES - 1) {
        if
        :: share_left[k] == 0 && number == NONE -> number = k
        :: else
        fi
    }
}
#endif

/* notify_shared: one writer, all readers before the first writer, or as many waiters as permits are free. */
inline wake()
{
#ifndef BUG_LOST_WAKEUP
    first = NONE; writer = N + 1;
    for (k : 0 .. N - 1) {
        first = (place[k] == 1 -> k : first);
        writer = (place[k] > 0 && mode[k] == WRITE && place[k] < writer -> place[k] : writer)
    };
    if
    :: first == NONE
    :: else ->
        count_held(mode[first]);
#ifdef PERMITS
        vacant = (held < permits -> permits - held : 0);
#ifdef BUG_WAKES_ONE
        vacant = (vacant > 1 -> 1 : vacant);
#endif
        for (k : 0 .. N - 1) { woken[k] = woken[k] || (place[k] > 0 && place[k] <= vacant) }
#else
        for (k : 0 .. N - 1) {
            if
            :: held > 0 || place[k] == 0
            :: held == 0 && place[k] > 0 ->
#ifdef BUG_WAKES_ONE
                woken[k] = woken[k] || place[k] == 1
#else
                woken[k] = woken[k] || place[k] == 1 || place[k] < writer
#endif
            fi
        }
#endif
    fi
#else
    skip
#endif
}

/* What follows from the state after each step. */
inline settle()
{
    check_exclusion();
    ticks = false; orphan = 0;
    for (j : 0 .. SHARES - 1) { ticks = ticks || share_left[j] > 0 };
    readers = 0; writers = 0;
    for (j : 0 .. N - 1) {
        ticks = ticks || trust[j] > 0 || flight[j] > 0;
        orphan = (place[j] > 0 && dead[j] -> j + 1 : orphan);
        turn[j] = false;
        if
        :: at[j] == WAITS && !dead[j] && place[j] > 0 -> decide(j); turn[j] = ok
        :: else
        fi;
        readers = readers || (turn[j] && !woken[j]);
        writers = writers || (downgrading[j] == LANDED || downgrading[j] == ANNOUNCES)
    };
    notices = notices && readers;
#ifndef LOOKS
    /* Truth 7: no waiter is forgotten, and those that can be served together are woken together. */
    assert(!readers || notices || writers);
#endif
    canonical()
}

inline send(i)
{
    at[i] = ASKS; flight[i] = TTL; woken[i] = false
}

#ifdef LOOKS
#define sees_its_turn(i) turn[i]
#else
#define sees_its_turn(i) (turn[i] && notices)
#endif

proctype Client(byte i)
{
end:
    do
#ifdef BUG_TOKEN_EARLY
    :: d_step { at[i] == THINKS && early[i] == 0 -> sequence++; early[i] = sequence; settle() }
#endif
#ifdef PERMITS
    :: d_step { at[i] == THINKS && !dead[i] -> mode[i] = PERMIT; send(i); settle() }
#else
    :: d_step { at[i] == THINKS && !dead[i] -> mode[i] = READ; send(i); settle() }
    :: d_step { at[i] == THINKS && !dead[i] -> mode[i] = WRITE; send(i); settle() }
#endif
#ifdef BUG_HEAD_UNLOCKED
    /* Decides before the head is locked. */
    :: d_step {
        at[i] == ASKS && decided[i] == 0 && !again[i] ->
        decide(i); decided[i] = (ok -> number + 1 : NONE); settle()
       }
    :: d_step { at[i] == ASKS && (decided[i] == NONE || again[i]) -> decided[i] = 0; acquire(i); settle() }
    :: d_step {
        at[i] == ASKS && decided[i] > 0 && decided[i] < NONE ->
        number = decided[i] - 1; decided[i] = 0; grant(i, number); leave_queue(i); answer(i, number); settle()
       }
#else
    :: d_step { at[i] == ASKS -> acquire(i); settle() }
#endif
    :: d_step {
        /* The reply is lost, and the client retries. */
        at[i] == ANSWERED && !again[i] && !dead[i] -> again[i] = true; at[i] = ASKS; flight[i] = TTL; settle()
       }
    :: d_step { at[i] == WAITS && !dead[i] && (woken[i] || place[i] == 0 || sees_its_turn(i)) -> send(i); settle() }
#ifdef LOOKS
    :: d_step { woken[i] -> woken[i] = false; settle() }             /* a notification is lost */
#endif
    :: d_step {
        /* The reply arrives. The trust was settled when the request was sent. */
        at[i] == ANSWERED && !dead[i] ->
#ifdef BUG_TRUST_FROM_REPLY
        trust[i] = TTL;
#else
        trust[i] = flight[i];
#endif
        flight[i] = 0; again[i] = false; at[i] = HOLDS;
        settle()
       }

    /* renew_all: of this exact grant, in transit for any time. */
    :: d_step {
        believes(i) && !renewed[i] && downgrading[i] == 0 ->
        renewed[i] = true; renewing[i] = SENT; flight[i] = TTL; settle()
       }
    :: d_step {
        renewing[i] == SENT ->
        ok = share_token[share[i]] == under[i] && share_left[share[i]] > 0;
#ifdef BUG_RENEW_BY_NUMBER
        ok = share_left[share[i]] > 0;
#endif
        /* Truth 3: a renewal extends its own grant. */
        assert(!ok || share_token[share[i]] == under[i]);
        renewing[i] = (ok -> LANDED : REFUSED);
        share_left[share[i]] = (ok -> TTL : share_left[share[i]]);
        settle()
       }
    :: d_step {
        renewing[i] == LANDED ->                                     /* unsure is lost */
        trust[i] = (believes(i) && flight[i] > trust[i] -> flight[i] : trust[i]);
        renewing[i] = 0; flight[i] = 0;
        settle()
       }
    :: d_step { renewing[i] == REFUSED -> trust[i] = 0; renewing[i] = 0; flight[i] = 0; settle() }

#ifdef PROVES
    /* assert_held in a transaction, which locks the share until it ends. Before that the client may release, lose or
     * renew the lease. */
    :: d_step {
        at[i] == HOLDS && !dead[i] && !proved[i] && share_token[share[i]] == under[i] && share_left[share[i]] > 0 ->
        proved[i] = true; proof[i] = share[i] + 1; settle()
       }
    :: d_step { proof[i] > 0 -> proof[i] = 0; notices = true; settle() }
#endif

#ifdef DOWNGRADES
    :: d_step {
        believes(i) && mode[i] == WRITE && renewing[i] == 0 && downgrading[i] == 0 ->
        downgrading[i] = SENT; flight[i] = TTL; settle()
       }
    /* downgrade: frees the writer's share and grants a reader's in one step. */
    :: d_step {
        downgrading[i] == SENT && !between[i] ->
        find_own(i, 1);
        if
        :: number != NONE ->                                         /* the reply to the first request was lost */
            flight[i] = (flight[i] < share_left[number] -> flight[i] : share_left[number]);
            downgrading[i] = LANDED; share[i] = number; under[i] = share_token[number]
        :: else ->
            ok = share_token[0] == under[i] && under[i] > 0 && share_left[0] > 0;
            for (k : 0 .. N - 1) { ok = ok && proof[k] != 1 };
#ifdef BUG_DOWNGRADE_REVIVES
            ok = true;
#endif
            if
            :: ok ->
                /* Truth 3: what is over does not become a read lease. */
                assert(share_token[0] == under[i] && share_left[0] > 0);
                share_left[0] = 0; share_of[0] = 0;
#ifdef BUG_DOWNGRADE_IN_TWO_STEPS
                between[i] = true; wake()
#else
                find_share(READ);
                m = number;
#ifdef BUG_DOWNGRADE_KEEPS_TOKEN
                sequence = under[i] - 1;
#endif
                grant(i, m);
                notices = notices || dead[i];                        /* no wake_queue follows */
                downgrading[i] = LANDED; share[i] = m; under[i] = share_token[m]
#endif
            :: else -> downgrading[i] = REFUSED
            fi
        fi;
        settle()
       }
#ifdef BUG_DOWNGRADE_IN_TWO_STEPS
    :: d_step {
        downgrading[i] == SENT && between[i] && share_left[0] == 0 ->
        between[i] = false; find_share(READ); m = number;
        grant(i, m);
        downgrading[i] = LANDED; share[i] = m; under[i] = share_token[m]; settle()
       }
#endif
    :: d_step {
        downgrading[i] == LANDED && !again[i] && !dead[i] ->
        again[i] = true; downgrading[i] = SENT; flight[i] = TTL; notices = true; settle()
       }
    :: d_step {
        downgrading[i] == LANDED && !dead[i] ->
        mode[i] = READ; trust[i] = flight[i]; flight[i] = 0;
        downgrading[i] = ANNOUNCES;
        settle()
       }
    /* wake_queue, in a transaction of its own. It may be lost like any notification. */
    :: d_step {
        downgrading[i] == ANNOUNCES ->
        downgrading[i] = REFUSED;
#ifndef BUG_DOWNGRADE_SILENT
        wake();
#endif
        settle()
       }
    :: d_step { downgrading[i] == REFUSED && mode[i] == WRITE && trust[i] > 0 -> trust[i] = 0; settle() }
#endif

    /* release: of this exact grant. */
    :: d_step {
        at[i] == HOLDS && !dead[i] && !is_leaving(i) ->
#ifdef BUG_RELEASE_BY_NUMBER
        ok = share_left[share[i]] > 0;
#else
        ok = share_token[share[i]] == under[i] && share_left[share[i]] > 0;
#endif
        if
        :: ok ->
            /* Truth 3: a release never frees the grant of another client. */
            assert(share_of[share[i]] == i + 1);
            share_left[share[i]] = 0;
            wake()
        :: else
        fi;
        at[i] = DONE;
        settle()
       }
#ifdef LEAVES
    /* abandon: gives back the ticket and every grant of the attempt, and after a downgrade without a reply both. */
    :: d_step {
        (at[i] == WAITS || at[i] == ANSWERED || (at[i] == HOLDS && downgrading[i] == LANDED)) && !dead[i] && stormy ->
        for (k : 0 .. SHARES - 1) { share_left[k] = (share_of[k] == i + 1 -> 0 : share_left[k]) };
        leave_queue(i);
#ifndef BUG_LEAVES_ALONE
        wake();
#endif
        at[i] = DONE; downgrading[i] = 0;
        settle()
       }
#endif
#ifdef CRASHES
    /* The client dies. What it has sent still arrives. */
    :: d_step {
        !dead[i] && at[i] != DONE && stormy ->
        dead[i] = true;
        notices = notices || downgrading[i] > 0;
        settle()
       }
#endif
    od
}

/* Time passes for the whole model at once, and stands still when nothing depends on it. */
proctype Clock()
{
end:
    do
    :: d_step {
        ticks ->
        for (k : 0 .. SHARES - 1) {
            if
            :: share_left[k] > 0 -> share_left[k]--; notices = notices || share_left[k] == 0
            :: else
            fi
        };
        for (k : 0 .. N - 1) {
            if :: trust[k] > 0 -> trust[k]-- :: else fi;
            if :: flight[k] > 0 -> flight[k]-- :: else fi
        };
        settle()
       }
    od
}

#ifdef CRASHES
/* live_tickets: tickets of clients without a heartbeat are passed over and pruned, wherever they are. */
proctype Passing()
{
end:
    do
    :: d_step {
        orphan > 0 -> leave_queue(orphan - 1); notices = true; settle()
       }
    od
}
#endif

#ifdef RESIZES
/* resize_semaphore: takes a permit from no holder. A larger number wakes the waiters that can be granted now. */
proctype Operator()
{
    d_step { permits = permits - 1; settle() };
    d_step {
        permits = permits + 1;
#ifndef BUG_GROWS_SILENTLY
        wake();
#endif
        settle()
    }
}
#endif

#define served_or_dead(i) (at[i] == DONE || dead[i])

/* No waiter is left: where no step is possible, every client is served or dead. */
proctype Judge()
{
#if defined(CRASHES) || defined(LEAVES)
    calm = true;
#endif
    timeout -> assert(served_or_dead(0) && served_or_dead(1) && served_or_dead(N - 1))
}

init
{
    atomic {
        byte i = 0;
        do
        :: i < N -> run Client(i); i++
        :: else -> break
        od;
        i = 0;
        run Clock();
#ifdef CRASHES
        run Passing();
#endif
#ifdef RESIZES
        run Operator();
#endif
        run Judge()
    }
}
