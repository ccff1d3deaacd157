# A client of dblock for bash and psql in one file: copy it, and source it. It runs on Linux.
#
#     source dblock.sh
#     dblock_run invoice:42 ./close_the_books.sh            # waits without end
#     DBLOCK_TTL=30 DBLOCK_TIMEOUT=5 dblock_run invoice:42 ./close_the_books.sh
#
# The command runs under the lock, with the token in $DBLOCK_TOKEN. The lease is renewed until the
# command ends. If the lease is lost, the command gets SIGTERM, and SIGKILL when it can no longer be
# trusted. The exit status is the command's own, or 75: the lock was busy, 76: the lease was lost,
# 69: the database could not be reached, 64: a variable has a wrong value.
#
# psql reports no notification while it waits. So a waiter polls ten times a second whether it is first.

# Start one session for all calls of this script. $DBLOCK_DSN names the database, else the variables of psql.
dblock_open() {
    local value
    for value in "${DBLOCK_TTL:-30}" "${DBLOCK_PATIENCE:-5}" "${DBLOCK_TIMEOUT:-1}"; do
        [[ $value =~ ^(0|[1-9][0-9]{0,8})$ ]] || { echo "dblock: $value is not a whole number of seconds" >&2; return 64; }
    done
    [[ -z ${DBLOCK_SESSION-} ]] || wait "$DBLOCK_SESSION" 2>/dev/null || true
    DBLOCK_CLIENT=${DBLOCK_CLIENT:-$(</proc/sys/kernel/random/uuid)}
    trap : PIPE # psql may have ended: then the next call fails, and not the whole script
    coproc DBLOCK_PSQL { exec psql -XAtq -F ' ' -v ON_ERROR_STOP=1 ${DBLOCK_DSN:+-d "$DBLOCK_DSN"}; }
    DBLOCK_SESSION=$DBLOCK_PSQL_PID
}

dblock_close() {
    dblock_call "SELECT dblock.leave_queue('$DBLOCK_CLIENT')" || true
    [[ -z ${DBLOCK_PSQL_PID-} ]] || exec {DBLOCK_PSQL[1]}>&-
    wait "$DBLOCK_SESSION" 2>/dev/null || true
}

# dblock_call STATEMENT [SECONDS]: run it in its own transaction, and put its row into REPLY. Fail if there is no reply.
dblock_call() {
    local line patience=${2:-${DBLOCK_PATIENCE:-5}}
    REPLY=
    [[ -n ${DBLOCK_PSQL_PID-} ]] || return 69
    printf '%s;\n\\echo end\n' "$1" >&"${DBLOCK_PSQL[1]}" || return 69
    while IFS= read -r -t "$patience" -u "${DBLOCK_PSQL[0]}" line; do
        [[ $line == end ]] && return 0
        REPLY=$line
    done
    kill "$DBLOCK_SESSION" 2>/dev/null # a late reply would be taken for that of the next call
    return 69
}

dblock_quote() { printf "'%s'" "${1//\'/\'\'}"; }

# Milliseconds of a clock that never jumps, in NOW.
dblock_now() {
    local up
    read -r up _ </proc/uptime
    NOW=$((10#${up/./} * 10))
}

# Milliseconds as seconds, in DBLOCK_SECONDS.
dblock_seconds() { printf -v DBLOCK_SECONDS '%d.%03d' $(($1 / 1000)) $(($1 % 1000)); }

# Trust a lease for 98 % of what the database says is left, counted from before the request.
dblock_trust() {
    local seconds milliseconds
    IFS=. read -r seconds milliseconds <<<"$2"
    milliseconds=${milliseconds}000
    DBLOCK_UNTIL=$(($1 + (seconds * 1000 + 10#${milliseconds:0:3}) * 98 / 100))
}

# dblock_acquire NAME: wait for the lock; set DBLOCK_TOKEN and DBLOCK_UNTIL, or return 75. A trap may set DBLOCK_ENDING.
dblock_acquire() {
    local name attempt had_ticket=false asked give_up granted token remaining ticket tickets free
    name=$(dblock_quote "$1")
    attempt=$(</proc/sys/kernel/random/uuid)
    dblock_now
    give_up=$((NOW + ${DBLOCK_TIMEOUT:-999999999} * 1000))
    while true; do
        dblock_now
        asked=$NOW
        dblock_call "SELECT granted, coalesce(token, 0), coalesce(round(remaining::numeric, 3), 0), coalesce(ticket, 0)
            FROM dblock.acquire($name, ttl => '${DBLOCK_TTL:-30} s', holder => 'bash pid $$',
                attempt => '$attempt', client => '$DBLOCK_CLIENT', had_ticket => $had_ticket)" || return
        read -r granted token remaining ticket <<<"$REPLY"
        if [[ $granted == t ]]; then
            DBLOCK_TOKEN=$token
            dblock_trust "$asked" "$remaining"
            return 0
        fi
        [[ $ticket == 0 ]] || had_ticket=true
        while true; do
            dblock_now
            if ((NOW >= give_up)) || [[ -n ${DBLOCK_ENDING-} ]]; then
                # Gives the ticket back, and the lock too if it was granted at this moment.
                dblock_call "SELECT dblock.abandon($name, '$attempt')" || return
                return 75
            fi
            sleep "${DBLOCK_POLL:-0.1}"
            ((NOW - asked < 1000)) && [[ $had_ticket == true ]] || break
            dblock_call "SELECT tickets, coalesce(0 = ANY (next_check), false)
                FROM dblock.heartbeat('$DBLOCK_CLIENT', ARRAY[$name])" || return
            read -r tickets free <<<"$REPLY"
            [[ $free == f && $tickets != 0 ]] || break
        done
    done
}

# dblock_renew NAME: extend the lease. 76 means that the lease is lost.
dblock_renew() {
    local asked left patience
    dblock_now
    asked=$NOW left=$((DBLOCK_UNTIL - NOW)) patience=$((${DBLOCK_PATIENCE:-5} * 1000))
    ((left > 0)) || return 76
    dblock_seconds $((left < patience ? left : patience)) # a reply after the end of the trust window is of no use
    dblock_call "SELECT round(remaining::numeric, 3)
        FROM dblock.renew($(dblock_quote "$1"), $DBLOCK_TOKEN, '${DBLOCK_TTL:-30} s')" "$DBLOCK_SECONDS" || return
    [[ -n $REPLY ]] || return 76
    dblock_trust "$asked" "$REPLY"
}

# dblock_release NAME: free the lock and wake the next waiter. REPLY is f if it was not held any more.
dblock_release() {
    dblock_call "SELECT dblock.release($(dblock_quote "$1"), $DBLOCK_TOKEN, durable => false)"
}

# dblock_run NAME COMMAND…: run the command under the lock.
dblock_run() (
    name=$1 renew_at=0 status=0 lost='' DBLOCK_ENDING=''
    shift
    trap 'DBLOCK_ENDING=yes' TERM INT HUP # from before the wait, so that neither a ticket nor the lock stays behind
    dblock_open || return
    dblock_acquire "$name" || status=$?
    if [[ $status != 0 || -n $DBLOCK_ENDING ]]; then
        ((status != 0)) || dblock_release "$name" || true
        dblock_close
        [[ -z $DBLOCK_ENDING ]] || return 143
        return "$status"
    fi
    export DBLOCK_TOKEN
    "$@" <&0 &
    command=$!
    while kill -0 "$command" 2>/dev/null; do
        dblock_now
        [[ -z $DBLOCK_ENDING ]] || { DBLOCK_ENDING='' && kill "$command" 2>/dev/null || true; }
        if ((NOW >= DBLOCK_UNTIL)); then
            lost=yes
            kill -KILL "$command" 2>/dev/null || true
        elif [[ -z $lost ]] && ((NOW >= renew_at)); then
            renew_at=$((NOW + ${DBLOCK_TTL:-30} * 1000 / 3))
            dblock_renew "$name" || { (($? == 76)) && lost=yes && kill "$command"; } || renew_at=0
        fi
        dblock_now
        left=$((DBLOCK_UNTIL - NOW))
        [[ -n $lost ]] || ((left > 0)) || continue # to the kill
        # Without a reply, try again in a new session: the lease lasts until the end of its trust window.
        ((renew_at > 0)) || [[ -n $lost ]] || dblock_open
        dblock_seconds $((left < 1 || left > 100 ? 100 : left))
        sleep "$DBLOCK_SECONDS"
    done
    wait "$command" || status=$?
    # A signal to all processes of the script has ended psql too. If neither session replies, the lease expires.
    dblock_release "$name" || { [[ -z $lost ]] && dblock_open && dblock_release "$name" && [[ $REPLY == t ]]; } || REPLY=unknown
    [[ $REPLY != f ]] || lost=yes
    dblock_close
    [[ -z $lost ]] || return 76
    return "$status"
)
