/* The protocol of one lock, for three clients, to be searched exhaustively by spin: see README.md.
 *
 * Each SQL function is one atomic step, for it holds the lock's row while it decides. Everything else may be interleaved,
 * delayed, lost or cut off: a request is on its way for any time, a client may stop between any two steps (which is what a
 * freeze is: others go on, and time with them) or die. Time is counted in ticks that pass for all at once: for the row's
 * deadline, and for the trust of a client, which began when its request was sent.
 *
 * Each client wants the lock ROUNDS times, and renews and writes a bounded number of times. So every run comes to an end, and
 * "every live waiter is served" is: no run ends anywhere but at the end of its clients.
 *
 * With -DBUG_… one thing is wrong, and the search must fail.
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
#define JUMP 8
#define NOBODY 255

/* The database: the lock's row, the line, the sequence. */
byte row_token = 0;             /* of the newest grant */
byte row_left = 0;              /* ticks until its deadline; 0: free */
bool row_released = true;       /* freed by somebody, who woke the next; not by time alone */
bool row_forced = false;
byte row_attempt = NOBODY;      /* whose request the newest grant was */
bool row_exists = false;
byte sequence = 0;
byte timeline = 1;
byte minted_on = 1;
byte line[N];
byte in_line = 0;

/* What a standby has: an older state of the same. */
byte copy_token = 0, copy_left = 0, copy_sequence = 0, copy_attempt = NOBODY;
bool copy_released = true;

/* The resource. */
byte fence = 0;

/* The clients, as far as others must see them. */
byte token[N];                  /* under which it holds the lock, as far as it knows; 0: it does not */
byte trust[N];                  /* ticks for which it may believe that */
byte flight[N];                 /* ticks of trust that a request under way would bring */
bool woken[N];
bool dead[N];

/* For the checks alone. */
byte newest = 0;                /* the highest token granted */
int minted = 0;                  /* one bit a token */
byte accepted = 0;              /* the highest token of a write that was accepted */
bool promoted = false;

/* Truth 4, and mutual exclusion: while one believes, no other does. Only a failover that forgets grants can break it. */
#define believes(i) (token[i] != 0 && trust[i] > 0)
inline check_alone(i)
{
    byte other = 0;
    do
    :: other < N ->
        assert(promoted || other == i || !(believes(i) && believes(other)));
        other++
    :: else -> break
    od;
    other = 0
}

inline leave_line(i)
{
    byte from = 0, to = 0;
    do
    :: from < in_line ->
        if
        :: line[from] != i -> line[to] = line[from]; to++
        :: else
        fi;
        from++
    :: else -> break
    od;
    in_line = to;
    do
    :: to < N -> line[to] = 0; to++
    :: else -> break
    od;
    from = 0; to = 0
}

/* wake_next: one release wakes one waiter, the first. */
inline wake_first()
{
#ifndef BUG_LOST_WAKEUP
    if
    :: in_line > 0 -> woken[line[0]] = true
    :: else
    fi
#else
    skip
#endif
}

/* try_acquire and enter_timeline: the token is minted while the row is held, after the last look at it. */
inline grant(i, early)
{
    if
    :: minted_on != timeline ->
#ifndef BUG_NO_JUMP
        sequence = sequence + JUMP;
#endif
        minted_on = timeline
    :: else
    fi;
    /* Truth 7: first come, first served. */
    assert(in_line == 0 || line[0] == i);
#ifdef BUG_TOKEN_EARLY
    row_token = early;
#else
    sequence++;
    row_token = sequence;
#endif
    /* Truth 1: the order of tokens is the order of grants; none is handed out twice. */
    assert((minted & (1 << row_token)) == 0);
    minted = minted | (1 << row_token);
    assert(row_token > newest || promoted);
    newest = (row_token > newest -> row_token : newest);
    row_exists = true;
    row_left = TTL;
    row_released = false;
    row_forced = false;
    row_attempt = i;
    leave_line(i);
#ifndef BUG_NO_CLAIM
    /* claim: whoever held it before is refused from here on. */
    fence = (row_token > fence -> row_token : fence)
#endif
}

/* acquire: if it is this client's turn, a grant; else a place in line, the lock being kept for who is there first. */
inline acquire(i, granted, early)
{
    granted = false;
    if
    :: row_left > 0 && row_attempt == i ->
        /* Sent again: its own grant is found, and no more than what is left of it. */
        granted = true;
        leave_line(i);
#ifndef BUG_WHOLE_TTL_AGAIN
        flight[i] = (flight[i] < row_left -> flight[i] : row_left)
#endif
#ifdef BUG_NO_RESERVE
    :: row_left == 0 -> grant(i, early); granted = true
#else
    :: row_left == 0 && (in_line == 0 || line[0] == i) -> grant(i, early); granted = true
#endif
    :: else ->
        byte place = 0;
        do
        :: place < in_line && line[place] != i -> place++
        :: else -> break
        od;
        if
        :: place == in_line -> line[in_line] = i; in_line++
        :: else
        fi;
        place = 0
    fi;
    under = (granted -> row_token : 0)
}

proctype Client(byte i)
{
    byte early = 0, under = 0;
    bool granted = false, ok = false, lost = false, renewed = false, wrote = false, believed = false;
#if ROUNDS > 1
    byte round = 0;
again:
#endif
#ifdef BUG_TOKEN_EARLY
    d_step { sequence++; early = sequence };
#endif
asks:
    atomic { flight[i] = TTL; woken[i] = false };
    d_step { acquire(i, granted, early) };
    if
    :: granted
    :: atomic { granted && !lost -> lost = true; granted = false } goto asks    /* the answer is lost; it asks again */
    :: atomic {
        /* Woken by who frees the lock; by itself at the deadline; or by a look at the line, if a wake-up was lost. */
        !granted && (woken[i] || (in_line > 0 && line[0] == i && row_left == 0 && (!row_released || promoted))
#ifdef LOOKS
            || (in_line > 0 && line[0] == i && row_left == 0)
#endif
        ) -> flight[i] = 0
       } goto asks
#ifdef CRASHES
    :: d_step { !granted -> dead[i] = true; flight[i] = 0 } goto gone            /* it dies in line */
#endif
    fi;
    /* The answer has come. How long it may be believed was settled when the request was sent. */
    d_step {
#ifdef BUG_TRUST_FROM_REPLY
        trust[i] = TTL;
#else
        trust[i] = flight[i];
#endif
        flight[i] = 0;
        granted = false;
        token[i] = under;
        believed = believes(i);
        if
        :: believed -> check_alone(i)
        :: else -> token[i] = 0                                      /* too late to be believed */
        fi
    };
    do
    :: atomic { believed && !renewed && believes(i) -> renewed = true; flight[i] = TTL };
        d_step {                                                     /* renew_all */
#ifdef BUG_RENEW_REVIVES
            ok = (row_token == under);
#else
            ok = (row_token == under && row_left > 0 && !row_forced);
#endif
            /* Truth 3: a renewal revives nothing. */
            assert(!ok || row_left > 0);
            if
            :: ok -> row_left = TTL; row_released = false
            :: else
            fi
        };
        if
        :: d_step {
            ok && believes(i) ->
            trust[i] = flight[i]; flight[i] = 0; ok = false;
            check_alone(i)
           }
        :: d_step { !ok -> trust[i] = 0; flight[i] = 0 }
        :: d_step { ok && !believes(i) -> flight[i] = 0; ok = false } /* unsure is lost */
        :: d_step { ok -> flight[i] = 0; ok = false }                /* the answer is lost */
        fi
    :: atomic { believed && !wrote && believes(i) -> wrote = true };
        /* On its way for any time: what was believed when it was sent may be long over. */
        d_step {
#ifdef BUG_NO_FENCE
            assert(under == newest || promoted);
#endif
            if
            :: under >= fence ->
                /* Truth 10: nothing below what was accepted, or claimed. */
                assert(under >= accepted);
                assert(under >= newest || promoted);
                fence = under;
                accepted = under
            :: else
            fi
        }
    :: believed = false; break
    od;
    if
    :: d_step {                                                      /* release, of this exact grant */
#ifdef BUG_RELEASE_BY_NAME
        row_left > 0 ->
#else
        row_token == under && row_left > 0 ->
#endif
        token[i] = 0; trust[i] = 0;
        row_left = 0; row_released = true; row_attempt = NOBODY;
        wake_first()
       }
    :: d_step { !(row_token == under && row_left > 0) -> token[i] = 0; trust[i] = 0 }
#ifdef CRASHES
    :: d_step { dead[i] = true; token[i] = 0; trust[i] = 0 }         /* it dies, holding the lock */
#endif
    fi;
#ifdef BUG_KEEPALIVE_OUTLIVES_RELEASE
    /* A renewal that was under way when the lock was released. */
    d_step {
        if
        :: row_token == under -> row_left = TTL; row_released = false
        :: else
        fi
    };
#endif
#ifndef CRASHES
    /* Truth 9: what was let go of is held by nobody under that token. */
    assert(promoted || row_token != under || row_left == 0);
#endif
#if ROUNDS > 1
    if
    :: atomic { !dead[i] && round + 1 < ROUNDS ->
        round++; lost = false; renewed = false; wrote = false; under = 0 } goto again
    :: else
    fi;
#endif
gone:
    skip;
    d_step { under = 0; lost = false; renewed = false; wrote = false; granted = false; early = 0 }
}

/* Time, for all at once; it stands still when nothing depends on it. */
active proctype Clock()
{
    byte i;
end:
    do
    :: d_step {
        (row_left > 0) ->
        row_left--;
        i = 0;
        do
        :: i < N ->
            if :: trust[i] > 0 -> trust[i]-- :: else fi;
            if :: flight[i] > 0 -> flight[i]-- :: else fi;
            i++
        :: else -> break
        od;
        i = 0
       }
    od
}

#ifdef CRASHES
/* first_in_line: places of the dead go, and who is first then is woken, if the lock is free. */
active proctype Passing()
{
    byte i = 0;
end:
    do
    :: d_step {
        in_line > 0 && dead[line[0]] ->
        i = line[0];
        leave_line(i);
        if
        :: row_left == 0 -> wake_first()
        :: else
        fi;
        i = 0
       }
    od
}
#endif

/* The reaper deletes a row that is free and that nobody waits for. The sequence goes on. */
active proctype Reaper()
{
end:
    if
    :: d_step {
#ifdef BUG_REAPER_TAKES_LIVING
        row_exists && in_line == 0 ->
        row_left = 0;
#else
        row_exists && row_left == 0 && in_line == 0 ->
#endif
        row_exists = false; row_token = 0; row_released = true; row_attempt = NOBODY
       }
    fi
}

#ifdef FORCE
/* force_release: the holder must let go, and keeps its deadline. */
active proctype Operator()
{
end:
    if
    :: d_step {
        row_left > 0 && !row_forced ->
#ifdef BUG_FORCE_FREES
        row_left = 0; row_released = true; row_attempt = NOBODY; wake_first()
#else
        row_forced = true
#endif
       }
    fi
}
#endif

#ifdef PROMOTES
/* A standby follows, behind by any distance, and is promoted once: what it had not seen is forgotten. */
active proctype Standby()
{
end:
    do
    :: d_step {
        !promoted && (copy_token != row_token || copy_sequence != sequence || copy_left != row_left) ->
        copy_token = row_token; copy_sequence = sequence; copy_left = row_left;
        copy_attempt = row_attempt; copy_released = row_released
       }
    :: d_step {
        !promoted && copy_sequence != sequence ->
        row_token = copy_token; sequence = copy_sequence; row_left = copy_left;
        row_attempt = copy_attempt; row_released = copy_released; row_forced = false;
        timeline++;
        promoted = true
       }
    od
}
#endif

init
{
    atomic {
        byte i = 0;
        do
        :: i < N -> run Client(i); i++
        :: else -> break
        od
    }
}
