/* One representative for all states that differ in nothing relevant: see README.md, "Why no state is missed".
 *
 * After every step, variables that will not be read again are set to 0, tokens are renumbered from 1 in their order,
 * and the clients, which are interchangeable, are sorted. This file decides nothing and uses no part of the protocol.
 */
c_decl {
    typedef unsigned char Byte;

    /* All variables of a client. */
#ifdef BUG_TOKEN_EARLY
    #define EARLY_OF(apply) apply(early)
#else
    #define EARLY_OF(apply)
#endif
#ifdef COPIES
    #define COPY_OF(apply) apply(copy_mine)
#else
    #define COPY_OF(apply)
#endif
#ifdef PRESENCE
    #define PRESENCE_OF(apply) apply(session) apply(doubt) apply(tied)
#else
    #define PRESENCE_OF(apply)
#endif
#if ROUNDS > 1
    #define ROUND_OF(apply) apply(round)
#else
    #define ROUND_OF(apply)
#endif
#ifdef PAUSES
    #define PAUSE_OF(apply) apply(paused)
#else
    #define PAUSE_OF(apply)
#endif
#ifdef TERMS
    #define TERM_OF(apply) apply(leading)
#else
    #define TERM_OF(apply)
#endif
    #define OF_A_CLIENT(apply) \
        apply(at) apply(place) apply(mine) apply(under) apply(trust) apply(flight) apply(woken) apply(again) \
        apply(renewing) apply(renewed) apply(writing) apply(dead) \
        EARLY_OF(apply) COPY_OF(apply) PRESENCE_OF(apply) ROUND_OF(apply) PAUSE_OF(apply) TERM_OF(apply)
}

c_code {
    static void forget(int i)
    {
#ifdef UNBOUNDED
        /* Nothing is counted. */
        now.renewed[i] = now.again[i] = 0;
        if (now.writing[i] == LANDED) now.writing[i] = 0;
#endif
        int over = now.at[i] == DONE || now.dead[i];
        int answered = now.renewing[i] == LANDED || now.renewing[i] == REFUSED;
        if (answered && (over || now.trust[i] == 0)) now.renewing[i] = 0;
        if (now.at[i] == HOLDS && now.trust[i] == 0) {
            now.flight[i] = 0;
#ifdef TERMS
            /* It does not lead, and others record the end of a term that it may have begun. */
            if (now.leading[i] != SENT) now.leading[i] = REFUSED;
#endif
#ifndef UNBOUNDED
            now.renewed[i] = 1;
#ifndef NO_WRITES
            if (now.writing[i] == 0) now.writing[i] = LANDED;
#endif
#endif
        }
        if (over && now.at[i] != ASKS) {
            now.flight[i] = now.trust[i] = now.woken[i] = now.again[i] = 0;
#if ROUNDS > 1
            if (now.dead[i]) now.round[i] = 0;
#endif
#ifdef PAUSES
            now.paused[i] = 0;
#endif
            if (now.writing[i] != SENT) now.writing[i] = 0;
            now.renewed[i] = 0;
#ifdef TERMS
            if (now.leading[i] != SENT) now.leading[i] = 0;
            if (now.writing[i] == 0 && now.renewing[i] == 0 && now.leading[i] == 0) now.under[i] = 0;
#else
            if (now.writing[i] == 0 && now.renewing[i] == 0) now.under[i] = 0;
#endif
            if (now.dead[i]) now.at[i] = DONE;
        }
#ifdef PRESENCE
        if (now.session[i] != CLOSED || now.at[i] == DONE) now.doubt[i] = 0;
        if (now.at[i] == DONE && !now.tied[i] && now.place[i] == 0 && now.renewing[i] != TYING) now.session[i] = 0;
#endif
    }

    static void rank(void)
    {
        Byte *kept[12 + 3 * N];
        int k = 0, i, value, top = 0, used;
        kept[k++] = &now.row_token; kept[k++] = &now.sequence; kept[k++] = &now.newest; kept[k++] = &now.fence;
#ifdef COPIES
        kept[k++] = &now.copy_token; kept[k++] = &now.copy_sequence;
#ifdef TERMS
        kept[k++] = &now.copy_open_term; kept[k++] = &now.copy_last_term;
#endif
#ifdef BUG_LEAP
        kept[k++] = &now.leapt;
#endif
#endif
#ifdef TERMS
        kept[k++] = &now.open_term; kept[k++] = &now.last_term;
#endif
        for (i = 0; i < N; i++) {
            kept[k++] = &now.under[i];
#ifdef BUG_TOKEN_EARLY
            kept[k++] = &now.early[i];
#endif
        }
        for (i = 0; i < k; i++) if (*kept[i] > top) top = *kept[i];
        for (value = top - 1; value > 0; value--) {
            for (used = i = 0; i < k; i++) used |= *kept[i] == value;
            if (!used) for (i = 0; i < k; i++) if (*kept[i] > value) --*kept[i];
        }
    }

#ifdef SORTED
    static int after(int i, int j)
    {
        #define COMPARE(field) if (now.field[i] != now.field[j]) return now.field[i] > now.field[j];
        OF_A_CLIENT(COMPARE)
        return 0;
    }

    static void put_in_order(int i, int j)
    {
        Byte kept;
        if (!after(i, j)) return;
        #define SWAP(field) kept = now.field[i]; now.field[i] = now.field[j]; now.field[j] = kept;
        OF_A_CLIENT(SWAP)
    }
#endif

    static void make_canonical(void)
    {
        int i, j, anybody = 0;
        for (i = 0; i < N; i++) {
#ifndef UNFORGOTTEN
            forget(i);
#endif
            anybody |= now.place[i];
        }
        if (now.row_left == 0) {
            now.row_forced = 0;
            for (i = 0; i < N; i++) now.mine[i] = 0;
            if (!anybody) now.row_released = 1;
#ifdef PRESENCE
            for (i = 0; i < N; i++) now.tied[i] = 0;
            now.noted = now.grace = 0;
#endif
        }
#ifndef UNRANKED
        rank();
#endif
#ifdef SORTED
        for (i = N - 1; i > 0; i--) for (j = 0; j < i; j++) put_in_order(j, j + 1);
#endif
    }
}

#ifdef TRACE
c_code {
    /* To follow a trail (./pan -r): the state after each step. */
    static void show(void)
    {
        int i;
        printf("row %d left %d%s%s", now.row_token, now.row_left, now.row_released ? "" : " unreleased",
            now.row_forced ? " forced" : "");
        printf(", sequence %d, newest %d, fence %d", now.sequence, now.newest, now.fence);
        for (i = 0; i < N; i++) {
            printf("\n   ");
            #define SHOW(field) if (now.field[i]) printf(" " #field " %d", now.field[i]);
            OF_A_CLIENT(SHOW)
        }
        printf("\n");
    }
}
#endif

inline canonical()
{
    c_code {
        make_canonical();
#ifdef TRACE
        if (readtrail) show();
#endif
    }
}
