/* One representative for all states that differ in nothing relevant, as canonical.pml for dblock.pml: see README.md,
 * "Why no state is missed".
 *
 * After every step, variables that will not be read again are set to 0, tokens are renumbered from 1 in their order,
 * and the clients and the shares, which are interchangeable, are sorted. This file decides nothing and uses no part of
 * the protocol.
 */
c_decl {
    typedef unsigned char Byte;

#ifdef PERMITS
    #define FIRST_SORTED 0
#else
    #define FIRST_SORTED 1
#endif
#ifdef BUG_TOKEN_EARLY
    #define EARLY_OF(apply) apply(early)
#else
    #define EARLY_OF(apply)
#endif
#ifdef BUG_HEAD_UNLOCKED
    #define DECIDED_OF(apply) apply(decided)
#else
    #define DECIDED_OF(apply)
#endif
    /* All variables of a client. */
    #define OF_A_CLIENT(apply) \
        apply(at) apply(mode) apply(place) apply(under) apply(trust) apply(flight) apply(woken) apply(again) \
        apply(renewing) apply(renewed) apply(downgrading) apply(between) apply(proved) apply(dead) apply(turn) \
        EARLY_OF(apply) DECIDED_OF(apply) apply(share) apply(proof)
}

c_code {
    static void forget(int i)
    {
        int over = now.at[i] == DONE || now.dead[i];
        if (now.renewing[i] >= LANDED && now.trust[i] == 0) now.renewing[i] = 0;
        if (now.at[i] == HOLDS && now.trust[i] == 0) {
            if (now.downgrading[i] != SENT && now.downgrading[i] != LANDED) now.flight[i] = 0;
            now.renewed[i] = 1;
        }
        if (now.at[i] == HOLDS && now.mode[i] != WRITE) now.again[i] = 0;
        if (!over) return;
        now.trust[i] = now.woken[i] = now.again[i] = now.renewed[i] = now.proved[i] = 0;
        if (now.dead[i]) now.between[i] = 0;
        if (now.at[i] == ASKS) return;
        now.at[i] = DONE;
        if (now.renewing[i] == SENT || now.downgrading[i] == SENT) return;
        now.flight[i] = now.renewing[i] = now.under[i] = now.share[i] = 0;
        if (now.downgrading[i] != ANNOUNCES) now.downgrading[i] = 0;
        if (now.place[i] == 0 && now.proof[i] == 0 && now.downgrading[i] == 0) now.mode[i] = 0;
    }

    static void rank(void)
    {
        Byte *kept[2 + SHARES + 2 * N];
        int k = 0, i, value, top = 0, used;
        kept[k++] = &now.sequence; kept[k++] = &now.newest;
        for (i = 0; i < SHARES; i++) kept[k++] = &now.share_token[i];
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

    static void swap(Byte *one, Byte *other)
    {
        Byte kept = *one;
        *one = *other;
        *other = kept;
    }

    static void rename_in(Byte *value, int one, int other)
    {
        *value = *value == one ? other : *value == other ? one : *value;
    }

    /* Free shares come last, and of those the ones that an old grant or an open transaction refers to come first. */
    static int weight(int s)
    {
        int i, sum = now.share_token[s] * 64;
        for (i = 0; i < N; i++) {
            if (now.proof[i] == s + 1) sum += 8;
            if (now.under[i] && now.share[i] == s) sum += 1 + now.under[i];
#ifdef BUG_HEAD_UNLOCKED
            if (now.decided[i] == s + 1) sum++;
#endif
        }
        return sum;
    }

    static void order_shares(int s, int r)
    {
        int i;
        if (weight(s) >= weight(r)) return;
        swap(&now.share_token[s], &now.share_token[r]);
        swap(&now.share_left[s], &now.share_left[r]);
        swap(&now.share_of[s], &now.share_of[r]);
        for (i = 0; i < N; i++) {
            if (now.under[i]) rename_in(&now.share[i], s, r);
            rename_in(&now.proof[i], s + 1, r + 1);
#ifdef BUG_HEAD_UNLOCKED
            rename_in(&now.decided[i], s + 1, r + 1);
#endif
        }
    }

    static int after(int i, int j)
    {
        #define COMPARE(field) if (now.field[i] != now.field[j]) return now.field[i] > now.field[j];
        OF_A_CLIENT(COMPARE)
        return 0;
    }

    static void order_clients(int i, int j)
    {
        int s;
        if (!after(i, j)) return;
        #define SWAP(field) { Byte kept = now.field[i]; now.field[i] = now.field[j]; now.field[j] = kept; }
        OF_A_CLIENT(SWAP)
        for (s = 0; s < SHARES; s++) rename_in(&now.share_of[s], i + 1, j + 1);
#ifdef CRASHES
        rename_in(&now.orphan, i + 1, j + 1);
#endif
    }

    static void make_canonical(void)
    {
        int i, j;
        for (i = 0; i < N; i++) forget(i);
        for (i = 0; i < SHARES; i++) if (now.share_left[i] == 0) now.share_of[i] = now.share_token[i] = 0;
        rank();
#ifndef RESIZES
        /* Where the number of permits changes, the highest share differs from the others. */
        for (i = SHARES - 1; i > FIRST_SORTED; i--) for (j = FIRST_SORTED; j < i; j++) order_shares(j, j + 1);
#endif
#ifdef SORTED
        for (i = N - 1; i > 0; i--) for (j = 0; j < i; j++) order_clients(j, j + 1);
#endif
    }
}

#ifdef TRACE
c_code {
    /* To follow a trail (./pan -r): the state after each step. */
    static void show(void)
    {
        int i;
        printf("sequence %d%s\n", now.sequence, now.notices ? ", waiters notice by themselves" : "");
        for (i = 0; i < SHARES; i++)
            if (now.share_left[i])
                printf("    share %d of %d: token %d left %d\n",
                    i, now.share_of[i], now.share_token[i], now.share_left[i]);
        for (i = 0; i < N; i++) {
            printf("   ");
            #define SHOW(field) if (now.field[i]) printf(" " #field " %d", now.field[i]);
            OF_A_CLIENT(SHOW)
            printf("\n");
        }
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
