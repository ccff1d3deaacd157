#!/usr/bin/env bash
# Contend for a lock with the client of docs/languages, and record a history: contend.sh HISTORY LOCK STOP TTL
set -uo pipefail
source "$(dirname "$0")/../../../docs/languages/dblock.sh"
path=$1 lock=$2 stop=$3 number=0
export DBLOCK_TTL=$4 LC_ALL=C

# The test gives the distance between the clock of bash and the monotonic one, in microseconds.
now() { AT=$((${EPOCHREALTIME/./} + MONOTONIC_OFFSET)); AT=$((AT / 1000000)).$(printf %06d $((AT % 1000000))); }

begin() { # KIND DETAILS [AT]
    now
    printf '{"id": %d, "at": %s, "kind": "%s", "key": "%s", "details": {%s}}\n' \
        "$number" "${3:-$AT}" "$1" "$lock" "$2" >>"$path"
    ID=$number number=$((number + 1))
}

end() { # OUTCOME DETAILS
    now
    printf '{"id": %d, "at": %s, "outcome": "%s", "details": {%s}}\n' "$ID" "$AT" "$1" "$2" >>"$path"
}

dblock_open
dblock_call "SELECT 1" || exit
echo ready
read -r
turn=0
while [[ ! -e $stop ]]; do
    turn=$((turn + 1))
    begin acquire "\"ttl\": $DBLOCK_TTL, \"timeout\": 30, \"keep_alive\": true"
    DBLOCK_TIMEOUT=30 dblock_acquire "$lock"
    status=$?
    dblock_now
    ((status == 75)) && { end failed ''; continue; }
    ((status == 0)) || exit "$status"
    end ok "\"token\": $DBLOCK_TOKEN"
    # One of forty holds is longer than the lease lasts without a renewal.
    ends=$((NOW + (turn % 40 == 10 ? DBLOCK_TTL * 1300 : 0))) renew_at=$((NOW + DBLOCK_TTL * 333))
    while true; do
        now
        before=$AT
        dblock_now
        if ((NOW >= DBLOCK_UNTIL)); then
            begin loss "\"token\": $DBLOCK_TOKEN"
            end ok ''
            break
        fi
        begin believe "\"token\": $DBLOCK_TOKEN" "$before"
        end ok ''
        ((NOW < ends)) || break
        sleep 0.02
        if ((NOW >= renew_at)); then
            dblock_renew "$lock"
            status=$?
            ((status == 76)) && DBLOCK_UNTIL=0 # the next look finds the lease lost
            ((status == 0 || status == 76)) || exit "$status"
            renew_at=$((NOW + DBLOCK_TTL * 333))
        fi
    done
    begin release "\"token\": $DBLOCK_TOKEN"
    dblock_release "$lock" || exit
    end ok "\"freed\": $([[ $REPLY == t ]] && echo true || echo false)"
done
dblock_close
