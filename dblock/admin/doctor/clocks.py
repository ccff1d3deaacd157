"""Whether the server's clock, which alone decides who holds a lock, goes as clocks should.

Said only of what cannot be explained otherwise: how long an answer was on its way is reckoned with.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator

from dblock._core import clock
from dblock.admin.doctor.patient import Check, Finding, Patient, Sample, of_server

AHEAD = 0.1
"""Seconds by which a row may lie in the future: the clocks of two processors need not agree to the last digit."""

SAMPLE = 0.3
"""Seconds between the two looks at the server's clock, at least."""

STEP, DRIFT = 0.05, 0.01
"""Seconds by which the clocks may differ over the sample, and the part of its length besides."""

APART = 5.0
"""Seconds by which the server's time of day may differ from this machine's."""

KEEP = "On the server: chronyc tracking (or timedatectl timesync-status), and let it slew the clock, never step it."


def clock_set_back(patient: Patient) -> Iterator[Finding]:
    """Look for what lies in the future, and cannot."""
    rows = patient.rows(
        "SELECT l.name, date_part('epoch', greatest(l.granted_at, l.released_at)) - now.now,"
        " CASE WHEN l.expires_at > clock_timestamp()"
        "  THEN date_part('epoch', l.expires_at) - now.now - date_part('epoch', l.ttl) END"
        f" FROM {patient.within('distributed_locks')} AS l,"
        " LATERAL (SELECT date_part('epoch', clock_timestamp()) AS now) AS now"
        " WHERE greatest(l.granted_at, l.released_at) > clock_timestamp() + make_interval(secs => $1)"
        " OR l.expires_at > clock_timestamp() + l.ttl + make_interval(secs => $1)"
        " ORDER BY 2 DESC NULLS LAST LIMIT 1000",
        AHEAD,
    )
    if not rows:
        return
    name, ahead, longer = rows[0]
    held = [row for row in rows if row[2] is not None and row[2] > AHEAD]
    by = max(ahead or 0.0, longer or 0.0)
    command = KEEP
    if held:
        command += f" To free a lock before: {patient.run('break', held[0][0])}"
    yield Finding(
        "warning",
        f"The server's clock was set back, by {by:.1f} s or more: {len(rows)} lock{'s' * (len(rows) > 1)} "
        f"(such as {shlex.quote(name)}) were granted or released in what is the future now, or last for longer than "
        f"their ttl; {len(held) or 'none'} of them held.",
        "A lock whose holder dies stays held for that much longer. What sets a clock back may set it ahead, and then "
        "leases run out before their holders know.",
        command,
    )


@of_server
def clock_steps(patient: Patient) -> Iterator[Finding]:
    """Look whether the server's clock goes as fast as ours."""
    first = patient.samples[0]
    time.sleep(max(0.0, first.after + SAMPLE - clock.now()))
    last = patient.sample()
    patient.samples.append(last)
    off = deviation(first, last)
    if off:
        yield Finding(
            "warning",
            f"In {last.after - first.before:.2f} s of this machine's clock the server's went {off:+.2f} s off.",
            "A lease is over when the server's clock says so, and believed in for as long as the client's says: if "
            "the server's runs ahead, another may have the lock before its holder knows.",
            KEEP,
        )


@of_server
def clock_difference(patient: Patient) -> Iterator[Finding]:
    """Look whether the server and this machine agree on the time of day."""
    sample = patient.samples[-1]
    apart = sample.server - sample.wall
    if abs(apart) - (sample.after - sample.before) / 2 > APART:
        yield Finding(
            "note",
            f"The server's clock is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} this machine's.",
            "Locks do not mind, for the server's alone decides; but times in logs of the two do not fit together.",
            "Have both follow the same time: chronyc tracking, on each.",
        )


def deviation(first: Sample, last: Sample) -> float:
    """Return by how many seconds the server's clock went wrong between two samples; 0 for what can be explained."""
    went = last.server - first.server
    least, most = last.before - first.after, last.after - first.before
    if went > most + STEP + DRIFT * most:
        return went - most
    if went < least - STEP - DRIFT * least:
        return went - least
    return 0.0


CHECKS = (Check(clock_set_back), clock_steps, clock_difference)
