/* The protocol of one lock, which spin searches exhaustively: see README.md.
 *
 * Each SQL function is one atomic step, because it holds the lock's row while it decides. Everything else may be
 * interleaved, delayed, lost or cut off. Requests and replies are in transit for any time. A client may stop between
 * any two steps (a freeze: other clients and the time continue) or die. Time is counted in ticks that pass for the
 * whole model at once: for the row's deadline, and for the trust of a client, which starts when it sends its request.
 *
 * Each client wants the lock ROUNDS times. In each round one reply may be lost, and the client renews once and writes
 * once. So every run ends, and "every live waiter is served" means that no run ends before every client is served or
 * dead. With ENDLESS there are infinitely many rounds, and the same is a property of infinite runs: `served`. With
 * UNBOUNDED nothing is counted: a client may lose replies, renew, write, die and be restarted any number of times.
 *
 * -DBUG_... seeds one bug, and the search must fail. -DCAN_... states that something is impossible, and the search
 * must fail too, because it is possible.
 */

#ifndef N
#define N 3
#endif
#ifndef ROUNDS
#define ROUNDS 1
#endif
#ifndef TTL
#define TTL 2
#endif
#ifndef GRACE
#define GRACE 1
#endif
#ifndef OWN_PART
#define OWN_PART GRACE
#endif
#ifdef UNBOUNDED
#define ENDLESS
#endif
#ifdef PRESENCE
#define LOOKS
#define NO_WRITES
#endif
#if defined(SIBLINGS) || defined(FLIPS_BACK)
#define PROMOTES
#define TWICE
#endif
#if defined(PROMOTES) || defined(PROMOTES_IN_STEP) || defined(RECOVERS)
#define COPIES
#endif

/* The states of a client. */
#define THINKS 0        /* it does not want the lock yet */
#define ASKS 1          /* its request is in transit */
#define ANSWERED 2      /* it was granted the lock, and the reply is in transit */
#define WAITS 3         /* it has a ticket, as far as it knows */
#define HOLDS 4         /* it has a lease, which it may or may not trust */
#define DONE 5          /* it has released, left or died */

/* The states of a renewal or a write. */
#define SENT 1
#define LANDED 2        /* for a renewal: granted */
#define REFUSED 3
#define TYING 4         /* a renewal in transit that ties the lease to a new session */

#define LEADS 5         /* for the beginning of a term: its reply has arrived */

/* The states of a client's presence. */
#define UP 0
#define CLOSED 1        /* by the server, or because its process ended */
#define EXCUSED 2       /* withdrawn: only the ttl of the lease decides */
#define EXCUSED_EARLY 3 /* withdrawn before the client knew whether it was granted the lock */

/* The database: the lock's row and the sequence. The queue is in the clients' positions. */
byte row_token = 0;             /* of the newest grant, 0: there is no row */
byte row_left = 0;              /* ticks until its deadline, 0: free */
bool row_released = true;       /* freed by a step that woke the next waiter, not only by time */
bool row_forced = false;
byte sequence = 0;

/* The resource. */
byte fence = 0;

/* What the database knows of the clients. */
byte place[N];                  /* position in the queue, from 1, 0: none */
bool mine[N];                   /* the newest grant was for its attempt */
/* What the clients know themselves. */
byte at[N];
byte under[N];                  /* the token of its lease */
byte trust[N];                  /* ticks for which it may trust its lease */
byte flight[N];                 /* ticks of trust that a request in transit would bring */
bool again[N];                  /* a reply was lost in this round */
byte renewing[N];
bool renewed[N];
byte writing[N];
bool dead[N];
/* What is in transit to them. */
bool woken[N];
#if ROUNDS > 1
byte round[N];
#endif
#ifdef BUG_TOKEN_EARLY
byte early[N];
#endif

#ifdef PAUSES
byte paused[N];                 /* 1: it sends no heartbeat, though it lives, 2: it was paused in this round */
#define awake(i) (paused[i] != 1)
#define not_heard_of(i) (dead[i] || paused[i] == 1)
#else
#define awake(i) true
#define not_heard_of(i) dead[i]
#endif

#ifdef PRESENCE
byte session[N];
byte doubt[N];                  /* ticks for which it may trust its lease though its session is closed */
bool tied[N];                   /* the newest grant is tied to its session */
bool noted = false;             /* a waiter has found the holder's session gone */
byte grace = 0;                 /* ticks of grace left */
bool restarted = false;
#endif

#ifdef TERMS
/* The log of an election, whose terms are grants that have begun. */
byte open_term = 0;             /* the token of the term that has not ended, 0: none */
byte last_term = 0;             /* the token of the newest term */
byte leading[N];                /* whether the client has begun a term in this round */
#define leads(i) (leading[i] == LEADS && believes(i))
#define begins(i) (leading[i] == SENT)
#else
#define begins(i) false
#endif

#ifdef COPIES
/* An older state of the database: that of a standby, or that on the disk. */
byte copied = 0;                /* 1: there is one, 2: it has replaced the newer state, 3: for the second time */
byte copy_token = 0, copy_left = 0, copy_sequence = 0;
bool copy_released = false, copy_forced = false;
bool copy_mine[N];
#ifdef TERMS
byte copy_open_term = 0, copy_last_term = 0;
#endif
bool caught_up = true;          /* the sequence follows the clock, as it was since this server minted a token */
#ifdef BUG_LEAP
byte leapt = 0;                 /* where the leap of a copy ends */
#endif
#endif

/* Only for the checks. */
#if (defined(CRASHES) || defined(LEAVES) || defined(PRESENCE)) && !defined(ENDLESS)
#define CALMS_DOWN
bool calm = false;              /* no client dies, leaves or is cut off any more, so a stuck waiter stays stuck */
#define stormy (!calm)
#else
#define stormy true
#endif
byte newest = 0;                /* the highest token granted */
bool forgotten = false;         /* the database has lost data */
bool unsafe = false;            /* an acknowledged grant was lost, or freed by force at once: only the fence is safe */

/* Scratch variables of a step, which are not part of the state. */
hidden byte k, queued, believers, gone, granted, ok;

#include "canonical.pml"

/* Truth 4, and mutual exclusion: while one client trusts its lease, no other client does. */
#ifdef PRESENCE
#define away(i) (place[i] > 0 && session[i] == CLOSED)
#ifdef BUG_DOUBT_IGNORED
#define stands(i) true
#else
#define stands(i) (session[i] != CLOSED || doubt[i] > 0)
#endif
#else
#define away(i) false
#define stands(i) true
#endif
#define believes(i) (at[i] == HOLDS && !dead[i] && trust[i] > 0 && stands(i))

/* A waiter is skipped when its session is gone, whether or not the client is alive. */
#define comes_before(j, i) (place[j] > 0 && place[j] < place[i] && !away(j))
#define is_first(i) (place[i] > 0 && !comes_before(0, i) && !comes_before(1, i) && !comes_before(N - 1, i))

#ifdef UNBOUNDED
#define may_renew(i) (renewing[i] == 0)
#define may_write(i) (writing[i] != SENT)
#define may_lose(i) true
#else
#define may_renew(i) (!renewed[i])
#define may_write(i) (writing[i] == 0)
#define may_lose(i) (!again[i])
#endif
#define under_way(i) (writing[i] == SENT || renewing[i] == SENT || renewing[i] == TYING || begins(i))
#define ALL(what) for (k : 0 .. N - 1) { what }

inline check_alone()
{
    believers = 0;
    for (k : 0 .. N - 1) { believers = believers + (believes(k) -> 1 : 0) };
    assert(unsafe || believers <= 1)
}

#ifdef TERMS
/* Truth 13: a term ends before the next one begins. So the leader's term is the open one. */
inline check_leaders()
{
    for (k : 0 .. N - 1) { assert(unsafe || !leads(k) || open_term == under[k]) }
}
#endif

inline count_queue()
{
    queued = 0;
    for (k : 0 .. N - 1) { queued = queued + (place[k] > 0 -> 1 : 0) }
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

/* wake_next: one release wakes one waiter, the first one. */
inline wake_first()
{
#ifndef BUG_LOST_WAKEUP
    for (k : 0 .. N - 1) {
        if
        :: is_first(k) && !away(k) -> woken[k] = true
        :: else
        fi
    }
#else
    skip
#endif
}

/* A durable commit: no crash and no synchronous standby goes back to before it. */
inline commit_durably()
{
#if defined(PROMOTES_IN_STEP) || defined(RECOVERS)
    if
    :: copied == 1 -> forget_copy()
    :: else
    fi
#else
    skip
#endif
}

inline forget_copy()
{
    copied = 0; copy_token = 0; copy_left = 0; copy_sequence = 0; copy_released = false; copy_forced = false;
#ifdef TERMS
    copy_open_term = 0; copy_last_term = 0;
#endif
    for (k : 0 .. N - 1) { copy_mine[k] = false }
}

inline free_row()
{
    row_left = 0; row_released = true;
    for (k : 0 .. N - 1) { mine[k] = false }
}

/* try_acquire and catch_up_tokens: the token is minted while the row is locked, after its last check. */
inline grant(i)
{
    /* Truth 7: first come, first served. */
    count_queue();
    assert(queued == 0 || is_first(i));
#ifdef COPIES
    if
    :: !caught_up ->
        caught_up = true;
#ifdef BUG_LEAP
        /* By the same distance from the same copy. */
        sequence = (leapt > 0 -> leapt : (newest > sequence -> newest : sequence) + 1);
        leapt = sequence
#else
#ifndef BUG_NO_JUMP
        /* The clock has passed every lost token. */
        sequence = (newest > sequence -> newest : sequence) + 1
#endif
#endif
    :: else
    fi;
#endif
#ifdef BUG_TOKEN_EARLY
    row_token = early[i];
#else
    sequence++;
    row_token = sequence;
#endif
    /* Truth 1: token order is grant order, so no token is issued twice. */
    assert(row_token > newest);
    newest = row_token;
    row_left = TTL;
    row_released = false;
    row_forced = false;
    for (k : 0 .. N - 1) { mine[k] = (k == i) };
    leave_queue(i);
#ifdef PRESENCE
    noted = false; grace = 0;
    for (k : 0 .. N - 1) { tied[k] = (k == i && session[k] < EXCUSED) };
#endif
#if defined(CLAIMS) && !defined(BUG_NO_CLAIM)
    /* claim: the previous holder is refused from here on. */
    fence = (row_token > fence -> row_token : fence);
#endif
#ifndef BUG_ASYNC_GRANT_WITH_TOKEN
    commit_durably()
#endif
}

/* acquire: a grant if it is this client's turn, else a ticket. A free lock is reserved for the first ticket. */
inline acquire(i)
{
    granted = false;
    count_queue();
#ifdef PRESENCE
    look_at_holder(i, true);
#endif
    if
    :: row_left > 0 && mine[i] ->
        /* A retry finds its own grant, and trusts only what is left of it. */
        granted = true;
        leave_queue(i);
#ifndef BUG_WHOLE_TTL_AGAIN
        flight[i] = (flight[i] < row_left -> flight[i] : row_left);
#endif
#ifdef CAN_FIND_ITS_GRANT
        assert(false);
#endif
        commit_durably()
#ifdef BUG_NO_RESERVE
    :: row_left == 0 -> grant(i); granted = true
#else
#ifdef BUG_EXPIRED_WAITER_GRANTED
    :: row_left == 0 && place[i] == 0 && paused[i] == 2 -> grant(i); granted = true
#endif
    :: row_left == 0 && (queued == 0 || is_first(i)) -> grant(i); granted = true
#endif
    :: else ->
#if defined(CAN_TAKE_NEW_TICKET) && defined(PAUSES)
        assert(!(place[i] == 0 && paused[i] == 2 && row_left == 0));
#endif
        if
        :: place[i] == 0 -> place[i] = queued + 1
        :: else
        fi
    fi;
    if
    :: granted ->
        woken[i] = false;
        at[i] = ANSWERED; under[i] = row_token
    :: else -> at[i] = WAITS; flight[i] = 0
    fi
}

#ifdef PRESENCE
/* remaining_grace: a waiter that finds the holder's session gone waits for the grace, and then takes the lock. */
inline look_at_holder(i, take)
{
    for (k : 0 .. N - 1) {
        if
        :: row_left > 0 && tied[k] && session[k] != UP && k != i ->
            if
            :: !noted -> noted = true; grace = GRACE
            :: else
            fi;
            if
#ifdef BUG_PRESENCE_TAKES_LIVING
            :: take ->
#else
            :: take && grace == 0 ->
#endif
#ifdef CAN_TAKE_FROM_THE_DEAD
                assert(!dead[k]);
#endif
#ifdef CAN_TAKE_FROM_THE_LIVING
                assert(dead[k]);
#endif
                noted = false; grace = 0;
                row_left = 0; row_released = true; tied[k] = false; mine[k] = false
            :: else
            fi
        :: else
        fi
    }
}
#define is_gone(i) (tied[i] && session[i] != UP)
#define holder_gone (row_left > 0 && (is_gone(0) || is_gone(1) || is_gone(N - 1)))
#endif

#ifdef PRESENCE
/* The grace that runs is that of this session. */
inline untie(i)
{
    if
    :: tied[i] -> tied[i] = false; noted = false; grace = 0
    :: else
    fi
}
#endif

inline send(i)
{
    at[i] = ASKS; flight[i] = TTL; woken[i] = false;
#ifdef PRESENCE
    /* A request does not name a presence that is in doubt. */
    if
    :: session[i] == CLOSED -> session[i] = EXCUSED
    :: else
    fi
#else
    skip
#endif
}

inline start_round(i)
{
    renewed[i] = false; writing[i] = 0; renewing[i] = 0; again[i] = false; under[i] = 0; mine[i] = false;
#ifdef COPIES
    copy_mine[i] = false;
#endif
#ifdef PAUSES
    paused[i] = 0;
#endif
#ifdef PRESENCE
    session[i] = UP; doubt[i] = 0;
#endif
#ifdef TERMS
    leading[i] = 0;
#endif
#ifdef BUG_TOKEN_EARLY
    early[i] = 0;
#endif
#if ROUNDS > 1
    round[i]++;
#endif
    at[i] = THINKS
}
#if ROUNDS > 1
#define another_round(i) (round[i] + 1 < ROUNDS)
#else
#define another_round(i) true
#endif

/* A waiter asks again by itself at the deadline, which it knows. With LOOKS also when it is first and the lock free. */
#ifdef PRESENCE
#define is_tied(i) tied[i]
#define can_take (holder_gone && noted && grace == 0)
#define was_cut_off(i) (session[i] == CLOSED)
#else
#define is_tied(i) false
#define can_take false
#define was_cut_off(i) false
#endif
#if defined(BUG_POLLS)
#define sees_its_turn(i) true
#elif defined(LOOKS) || defined(COPIES)
#define sees_its_turn(i) (is_first(i) && (row_left == 0 || can_take))
#else
#define sees_its_turn(i) (is_first(i) && ((row_left == 0 && !row_released) || can_take))
#endif

proctype Client(byte i)
{
end:
    do
#ifdef BUG_TOKEN_EARLY
    :: d_step { at[i] == THINKS && early[i] == 0 -> sequence++; early[i] = sequence; canonical() }
    :: d_step { at[i] == THINKS && early[i] > 0 -> send(i); canonical() }
#else
    :: d_step { at[i] == THINKS && !dead[i] -> send(i); canonical() }
#endif
    :: d_step { at[i] == ASKS -> acquire(i); canonical() }
    :: d_step {
        /* The reply is lost, and the client retries. */
        at[i] == ANSWERED && may_lose(i) && !dead[i] -> again[i] = true; at[i] = ASKS; flight[i] = TTL; canonical()
       }
    :: d_step {
        /* Woken by the step that freed the lock, by the deadline, or by a heartbeat. */
        at[i] == WAITS && !dead[i] && awake(i) &&
        (woken[i] || place[i] == 0 || was_cut_off(i) || sees_its_turn(i)) -> send(i); canonical()
       }
#ifdef LOOKS
    :: d_step { woken[i] -> woken[i] = false; canonical() }          /* a notification is lost */
#endif
    :: d_step {
        /* The reply arrives. The trust was settled when the request was sent. */
        at[i] == ANSWERED && !dead[i] ->
#ifdef BUG_TRUST_FROM_REPLY
        trust[i] = TTL;
#else
        trust[i] = flight[i];
#endif
        flight[i] = 0; again[i] = false;
        at[i] = HOLDS;
#ifdef PAUSES
        paused[i] = 0;
#endif
#ifdef PRESENCE
        if
#ifndef BUG_EXCUSED_EARLY
        :: session[i] == EXCUSED_EARLY || !stands(i) -> trust[i] = 0  /* the lock may have been taken */
#endif
        :: else
        fi;
#endif
        check_alone();
        canonical()
       }

    /* renew_all: in transit for any time, whatever happens to the client. */
    :: d_step { believes(i) && may_renew(i) -> renewed[i] = true; renewing[i] = SENT; flight[i] = TTL; canonical() }
#ifdef PRESENCE
    :: d_step {
        /* The client has a session again. From here on the lease may end with it, whether or not this arrives. */
        believes(i) && may_renew(i) && session[i] == EXCUSED && stormy ->
        renewed[i] = true; renewing[i] = TYING; flight[i] = TTL; session[i] = UP;
        canonical()
       }
#endif
    :: d_step {
        renewing[i] == SENT || renewing[i] == TYING ->
        ok = (row_token == under[i] && row_left > 0 && !row_forced);
#ifdef BUG_RENEW_REVIVES
        ok = (row_token == under[i] && (row_left > 0 || !row_released));
#endif
#ifdef BUG_KEEPALIVE_OUTLIVES_RELEASE
        ok = (row_token == under[i] && (row_left > 0 || at[i] == DONE));
#endif
#ifdef BUG_FORCED_IS_RENEWED
        ok = (row_token == under[i] && row_left > 0);
#endif
        /* Truth 9: a released lock is not held under that token. */
        assert(!ok || dead[i] || at[i] == HOLDS || forgotten);
        /* Truth 3: a renewal revives nothing. */
        assert(!ok || row_left > 0);
        /* A holder that was told to release is not renewed. */
        assert(!ok || !row_forced);
#ifdef PRESENCE
        if
        :: ok && renewing[i] == TYING -> untie(i); tied[i] = (session[i] < EXCUSED)
        :: else
        fi;
#endif
        renewing[i] = (ok -> LANDED : REFUSED);
        if
        :: ok -> row_left = TTL; row_released = false; commit_durably()
        :: else
        fi;
        canonical()
       }
    :: d_step {
        renewing[i] == LANDED ->                                     /* unsure is lost */
        trust[i] = (believes(i) && flight[i] > trust[i] -> flight[i] : trust[i]);
        renewing[i] = 0; flight[i] = 0;
        check_alone();
        canonical()
       }
    :: d_step { renewing[i] == LANDED -> renewing[i] = 0; flight[i] = 0; canonical() }      /* the reply is lost */
    :: d_step { renewing[i] == REFUSED -> trust[i] = 0; renewing[i] = 0; flight[i] = 0; canonical() }

#ifndef NO_WRITES
    /* A write: in transit for any time, so the lease may be over when it arrives. */
    :: d_step { believes(i) && may_write(i) -> writing[i] = SENT; canonical() }
    :: d_step {
        writing[i] == SENT ->
        writing[i] = LANDED;
        if
#ifdef BUG_NO_FENCE
        :: true ->
#else
        :: under[i] >= fence ->
#endif
            /* Truth 10: no write below an accepted one, */
            assert(under[i] >= fence);
#ifdef CLAIMS
            /* or below a claim. */
            assert(under[i] >= newest);
#endif
#ifdef CAN_WRITE_LATE
            assert(under[i] >= newest);
#endif
            fence = under[i]
        :: else
        fi;
        canonical()
       }
#endif

#ifdef TERMS
    /* begin_term: in transit for any time. A client that sends none has to yield, and releases. */
    :: d_step { believes(i) && leading[i] == 0 -> leading[i] = SENT; canonical() }
    :: d_step {
        leading[i] == SENT ->
        ok = (row_token == under[i] && row_left > 0);
#ifdef BUG_BEGIN_UNPROVEN
        ok = true;
#endif
        if
        :: ok && last_term == under[i] ->                            /* a retry finds the term that it has begun */
            leading[i] = (open_term == under[i] -> LANDED : REFUSED)
        :: ok && last_term != under[i] ->
#ifndef BUG_TERM_LEFT_OPEN
            open_term = 0;                                           /* end_terms_below */
#endif
            /* Truth 13: a term begins when the last one has ended, and under a higher token. */
            assert(open_term == 0);
            assert(under[i] > last_term);
            open_term = under[i]; last_term = under[i];
            leading[i] = LANDED;
#ifndef BUG_ASYNC_TERM
            commit_durably()
#endif
        :: else -> leading[i] = REFUSED
        fi;
        check_leaders();
        canonical()
       }
    :: d_step { leading[i] == LANDED && may_lose(i) && !dead[i] -> again[i] = true; leading[i] = SENT; canonical() }
    :: d_step {
#ifdef BUG_LEADS_EARLY
        leading[i] == SENT && at[i] == HOLDS && !dead[i] ->
#else
        leading[i] == LANDED && at[i] == HOLDS && !dead[i] ->
#endif
        leading[i] = LEADS; check_leaders(); canonical()
       }
#endif

    /* release: of this exact grant. */
    :: d_step {
        at[i] == HOLDS && !dead[i] ->
        if
#ifdef BUG_RELEASE_BY_NAME
        :: row_left > 0 ->
#else
        :: row_token == under[i] && row_left > 0 ->
#endif
            /* Truth 3: a release never frees the grant of another client. */
            assert(row_token == under[i]);
#ifdef TERMS
            /* end_term. A client that did not learn that its term has begun only releases. */
            open_term = (leading[i] == LEADS && open_term == under[i] -> 0 : open_term);
#endif
            free_row();
            wake_first()
        :: else
        fi;
        trust[i] = 0; flight[i] = 0;
        at[i] = DONE;
        canonical()
       }
#if ROUNDS > 1 || defined(ENDLESS)
    :: d_step {
        at[i] == DONE && !dead[i] && !under_way(i) && another_round(i) -> start_round(i); canonical()
       }
#endif
#ifdef LEAVES
    /* abandon: gives back the ticket, and the grant if there is one by now. */
    :: d_step {
        (at[i] == WAITS || at[i] == ANSWERED) && !dead[i] && stormy ->
        if
        :: row_left > 0 && mine[i] -> free_row()
        :: else
        fi;
        leave_queue(i);
#ifndef BUG_LEAVES_ALONE
        if
        :: row_left == 0 -> wake_first()
        :: else
        fi;
#endif
        at[i] = DONE; woken[i] = false; flight[i] = 0;
        canonical()
       }
#endif
#ifdef CRASHES
    /* The client dies. What it has sent still arrives. */
    :: d_step {
        !dead[i] && at[i] != DONE && stormy ->
        dead[i] = true;
#ifdef PRESENCE
        session[i] = (session[i] == UP -> CLOSED : session[i]);
#endif
        canonical()
       }
#endif
#ifdef UNBOUNDED
    /* A new process replaces it once nothing of the old one is left. */
    :: d_step {
        dead[i] && at[i] == DONE && place[i] == 0 && !under_way(i) && !is_tied(i) ->
        dead[i] = false; start_round(i); canonical()
       }
#endif
#ifdef PAUSES
    :: d_step { at[i] == WAITS && !dead[i] && paused[i] == 0 -> paused[i] = 1; canonical() }
    :: d_step { paused[i] == 1 -> paused[i] = 2; canonical() }
#endif
#ifdef PRESENCE
    /* The server or the network closes the session of a live client. */
    :: d_step {
        session[i] == UP && !dead[i] && at[i] != DONE && stormy ->
        session[i] = CLOSED; doubt[i] = OWN_PART; canonical()
       }
    /* withdraw_presence: the client reports that it is alive, and learns which locks were taken. */
    :: d_step {
        session[i] == CLOSED && !dead[i] && at[i] == HOLDS ->
        session[i] = EXCUSED; doubt[i] = 0;
        if
        :: row_token == under[i] && row_left > 0
        :: else -> trust[i] = 0
        fi;
#ifndef BUG_EXCUSE_UNHEARD
        untie(i);
#endif
        check_alone();
        canonical()
       }
    :: d_step {
        session[i] == CLOSED && !dead[i] && (at[i] == ASKS || at[i] == ANSWERED) ->
        session[i] = EXCUSED_EARLY; doubt[i] = 0; untie(i);
        canonical()
       }
    /* heartbeat: the first waiter checks whether the holder is alive. */
    :: d_step {
        at[i] == WAITS && !dead[i] && is_first(i) && holder_gone && !noted ->
        noted = true; grace = GRACE; canonical()
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
        row_left + trust[0] + trust[1] + trust[N - 1] > 0 ->
        if :: row_left > 0 -> row_left-- :: else fi;
#ifdef COPIES
        if :: copy_left > 0 -> copy_left-- :: else fi;
#endif
        for (k : 0 .. N - 1) {
            if :: trust[k] > 0 -> trust[k]-- :: else fi;
            if :: flight[k] > 0 -> flight[k]-- :: else fi;
#ifdef PRESENCE
            if :: doubt[k] > 0 -> doubt[k]-- :: else fi
#endif
        };
#ifdef PRESENCE
        if :: grace > 0 -> grace-- :: else fi;
#endif
        canonical()
       }
    od
}

#if defined(CRASHES) || defined(PAUSES) || defined(PRESENCE)
#define may_be_passed(i) (place[i] == 1 && (not_heard_of(i) || away(i)))
/* first_in_queue: tickets of clients without a heartbeat are pruned. If the lock is free, the first waiter is woken. */
proctype Passing()
{
end:
    do
    :: d_step {
        may_be_passed(0) || may_be_passed(1) || may_be_passed(N - 1) ->
        for (k : 0 .. N - 1) { gone = (place[k] == 1 -> k : gone) };
        leave_queue(gone);
        if
        :: row_left == 0 -> wake_first()
        :: else
        fi;
        canonical()
       }
    od
}
#endif

/* reap: deletes a row that is free and has no waiter. The sequence continues. */
proctype Reaper()
{
end:
    do
    :: d_step {
#ifdef BUG_REAPER_TAKES_LIVING
        row_token > 0 && place[0] + place[1] + place[N - 1] == 0 ->
        row_left = 0;
#else
        row_token > 0 && row_left == 0 && place[0] + place[1] + place[N - 1] == 0 ->
#endif
#ifdef BUG_REAPER_LOWERS_TOKENS
        sequence = 0;
#endif
        row_token = 0; row_released = true;
        canonical()
       }
    od
}

#ifdef TERMS
/* record_ended_term: any reader of the log records the end of a term whose grant does not hold the lock any more. */
proctype Observer()
{
end:
    do
    :: d_step {
#ifdef BUG_OBSERVER_ENDS_LIVING
        open_term > 0 ->
#else
        open_term > 0 && !(row_token == open_term && row_left > 0) ->
#endif
        open_term = 0; check_leaders(); canonical()
       }
    od
}
#endif

#if defined(FORCE) || defined(FORCE_NOW)
/* force_release: the holder must release, and keeps its deadline. */
proctype Operator()
{
end:
    do
#ifdef FORCE
    :: d_step {
        row_left > 0 && !row_forced ->
#ifdef BUG_FORCE_FREES
        free_row(); wake_first();
#else
        row_forced = true;
#endif
        commit_durably();
        canonical()
       }
#endif
#ifdef FORCE_NOW
    /* With `now` the lock is free at once, and only the fence is safe. wake_queue follows. */
    :: d_step { row_left > 0 && !unsafe -> unsafe = true; free_row(); wake_first(); canonical() }
#endif
    od
}
#endif

#ifdef COPIES
#ifdef TWICE
#define may_go_back (copied == 1 || copied == 2)
#define exchange(one, other) ok = one; one = other; other = ok
#else
#define may_go_back (copied == 1)
#endif

inline go_back()
{
#ifdef FLIPS_BACK
    /* The frozen primary is kept in the place of the copy. */
    exchange(row_token, copy_token); exchange(sequence, copy_sequence); exchange(row_left, copy_left);
    exchange(row_released, copy_released); exchange(row_forced, copy_forced);
    for (k : 0 .. N - 1) { exchange(mine[k], copy_mine[k]) };
#ifdef TERMS
    exchange(open_term, copy_open_term); exchange(last_term, copy_last_term);
#endif
#else
    row_token = copy_token; sequence = copy_sequence; row_left = copy_left; row_released = copy_released;
    row_forced = copy_forced;
    for (k : 0 .. N - 1) { mine[k] = copy_mine[k] };
#ifdef TERMS
    open_term = copy_open_term; last_term = copy_last_term;
#endif
#endif
#ifndef RECOVERS
#if defined(FLIPS_BACK) && defined(BUG_LEAP)
    caught_up = (copied == 2);      /* it was not started again */
#else
    caught_up = false;
#endif
#endif
#ifdef TWICE
    copied++;
    if
    :: copied == 3 -> forget_copy(); copied = 3
    :: else
    fi;
#else
    forget_copy();
    copied = 2;
#endif
#ifdef PROMOTES
    unsafe = true;
#endif
#ifdef TERMS
    check_leaders();
#endif
    forgotten = true
}

/* A standby follows at any distance and is promoted once, or the server crashes and has what reached the disk. Only the
 * last state that it has seen counts, so one state of any moment is kept.
 *
 * With SIBLINGS a second standby with the same copy is promoted later, which never saw the first one. With FLIPS_BACK the
 * primary was only frozen, and becomes the leader again later. */
proctype Standby()
{
end:
    do
    :: d_step {
        copied == 0 ->
        copied = 1; copy_token = row_token; copy_sequence = sequence; copy_left = row_left;
        copy_released = row_released; copy_forced = row_forced;
        for (k : 0 .. N - 1) { copy_mine[k] = mine[k] };
#ifdef TERMS
        copy_open_term = open_term; copy_last_term = last_term;
#endif
        canonical()
       }
    :: d_step { may_go_back -> go_back(); canonical() }
    :: d_step { may_go_back -> go_back(); ALL(place[k] = 0;); canonical() }      /* tickets are lost too */
    od
}
#endif

#ifdef RESTARTS
/* The server restarts after a crash: all sessions end, and no earlier presence counts. Its clients learn that. */
proctype Server()
{
end:
    do
    :: d_step {
        !restarted && stormy ->
        restarted = true;
#ifndef BUG_PRESENCE_AFTER_RESTART
        noted = false; grace = 0;
        ALL(tied[k] = false;)
#endif
        for (k : 0 .. N - 1) {
            session[k] = (dead[k] || session[k] != UP || at[k] == DONE -> session[k] :
                (at[k] == HOLDS -> EXCUSED : EXCUSED_EARLY))
        };
        canonical()
       }
    od
}
#endif

#define served_or_dead(i) (at[i] == DONE || dead[i])

#ifndef ENDLESS
/* No waiter is left: where no step is possible, every client is served or dead. */
proctype Judge()
{
#ifdef CALMS_DOWN
    calm = true;
#endif
    timeout -> assert(served_or_dead(0) && served_or_dead(1) && served_or_dead(N - 1))
}
#elif !defined(UNBOUNDED)
ltl served { [] (at[0] == WAITS -> <> (at[0] == HOLDS || served_or_dead(0))) }
#endif

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
        run Reaper();
#ifdef TERMS
        run Observer();
#endif
#if defined(CRASHES) || defined(PAUSES) || defined(PRESENCE)
        run Passing();
#endif
#if defined(FORCE) || defined(FORCE_NOW)
        run Operator();
#endif
#ifdef COPIES
        run Standby();
#endif
#ifdef RESTARTS
        run Server();
#endif
#ifndef ENDLESS
        run Judge()
#endif
    }
}
