"""Elections for threads: terms, hand-overs, the log of terms, and what a body may rely on."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

import dblock
from dblock import Leader, Term, Vacancy
from dblock.admin import privileges
from dblock.recipes.elections.flows import Position
from tests.support.eventually import eventually
from tests.support.machine import measured

PATIENCE = 60.0


class Candidate:
    """A candidate that campaigns in a thread of its own. Its body waits until the term must end."""

    def __init__(self, dsn: str, holder: str, **options: Any) -> None:
        self.client = dblock.Client(dsn, holder=holder, patience=PATIENCE)
        self.election = self.client.election("e", **options)
        self.terms: list[int] = []
        self.led = threading.Event()
        self.bodies = 0
        """How many bodies run at this moment."""
        self.result: Any = None
        self.body: Callable[[Term], Any] = lambda term: term.wait(PATIENCE) and None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.result = self.election.run(self._lead)

    def _lead(self, term: Term) -> Any:
        self.bodies += 1
        self.terms.append(term.token)
        self.led.set()
        try:
            return self.body(term)
        finally:
            self.led.clear()
            self.bodies -= 1

    def close(self) -> None:
        self.election.stop()
        self._thread.join(PATIENCE)
        self.client.close()
        assert not self._thread.is_alive()


@pytest.fixture
def client(dsn: str) -> Iterator[dblock.Client]:
    with dblock.Client(dsn, patience=PATIENCE) as made:
        yield made


@pytest.fixture
def candidates(dsn: str) -> Iterator[Callable[..., Candidate]]:
    with ExitStack() as stack:

        def make(holder: str, **options: Any) -> Candidate:
            made = Candidate(dsn, holder, **options)
            stack.callback(made.close)
            return made

        yield make


def recording(other: Candidate, bodies: list[int]) -> Callable[[Term], None]:
    """Return a body that records how many bodies of another candidate run when it begins."""

    def body(term: Term) -> None:
        bodies.append(other.bodies)
        term.wait(PATIENCE)

    return body


def waiting(owner: psycopg.Connection) -> int:
    ((count,),) = owner.execute("SELECT count(*) FROM list_candidates('e')").fetchall()
    return int(count)


def log(client: dblock.Client) -> list[tuple[str, str]]:
    """Return the whole log: each beginning and end, with its holder."""
    events = client.election("e").observe(0, timeout=0)
    return [(one.how if isinstance(one, Vacancy) else "leads", one.holder) for one in events]


def test_term_is_seen_by_others_until_its_body_has_returned(client: dblock.Client, dsn: str) -> None:
    election = client.election("e", value={"url": "http://a"})
    assert election.leader() is None
    assert not election.is_leader()
    with dblock.Client(dsn) as other, election.lead() as term:
        assert election.is_leader()
        assert term.remaining() > 0
        seen = other.election("e").leader()
        assert seen is not None
        assert (seen.token, seen.value) == (term.token, {"url": "http://a"})
        term.publish({"url": "http://b"})
        seen = other.election("e").leader()
        assert seen is not None
        assert seen.value == {"url": "http://b"}
    assert not election.is_leader()
    assert election.leader() is None
    assert term.remaining() == 0
    with pytest.raises(dblock.LeaseLost):
        term.publish(1)


def test_later_terms_have_higher_tokens(client: dblock.Client) -> None:
    election = client.election("e")
    tokens = []
    for _ in range(3):
        with election.lead() as term:
            tokens.append(term.token)
    assert tokens == sorted(set(tokens))


def test_candidate_leads_one_term_at_a_time(client: dblock.Client) -> None:
    election = client.election("e")
    with election.lead(), pytest.raises(dblock.DblockError, match="campaigns or leads already"):
        election.campaign(0)
    with election.lead(), pytest.raises(dblock.DblockError, match="campaigns or leads already"):
        election.run(lambda term: None)
    with election.lead(0):
        pass


@pytest.mark.second_stage
def test_campaign_that_times_out_leaves_nothing_behind(client: dblock.Client, owner: psycopg.Connection) -> None:
    with client.election("e").lead():
        with pytest.raises(dblock.LockTimeout):
            client.election("e").campaign(1.5)
        assert waiting(owner) == 0
        assert owner.execute("SELECT count(*) FROM candidates").fetchall() == [(0,)]


def test_body_that_fails_ends_its_term_as_failed(client: dblock.Client) -> None:
    with pytest.raises(ValueError, match="broken"), client.election("e").lead():
        raise ValueError("broken")
    assert [how for how, _ in log(client)] == ["leads", "failed"]


def test_resign_returns_when_the_body_has_returned(
    candidates: Callable[..., Candidate], owner: psycopg.Connection
) -> None:
    first = candidates("a")
    first.led.wait(PATIENCE)
    may_return = threading.Event()
    overlaps: list[int] = []

    def slow(term: Term) -> None:
        term.wait()
        may_return.wait(PATIENCE)

    first.body = slow
    first.election.resign()  # the next body is the slow one
    eventually(lambda: len(first.terms) == 2)
    second = candidates("b")
    second.body = recording(first, overlaps)
    eventually(lambda: waiting(owner) == 1)
    assert first.election.resign(timeout=0.3) is False, "its body has not returned"
    assert not second.terms, "granted while the body of the old term runs"
    may_return.set()
    eventually(lambda: overlaps)
    assert overlaps == [0], "the old body ran when the new one began"


@pytest.mark.second_stage
def test_body_that_ignores_the_request_keeps_its_term_until_the_deadline(
    client: dblock.Client, caplog: pytest.LogCaptureFixture
) -> None:
    election = client.election("e", ttl=1)
    ignoring, lost = threading.Event(), []

    def ignore() -> None:
        with pytest.raises(dblock.LeaseLost), election.lead() as term:
            ignoring.set()
            term.ending.wait(PATIENCE)
            term.lost.wait(PATIENCE)
            lost.append(term.ending_reason)

    thread = threading.Thread(target=ignore)
    thread.start()
    ignoring.wait(PATIENCE)
    with caplog.at_level(logging.WARNING, "dblock"):
        assert election.resign() is False
    thread.join(PATIENCE)
    assert lost == ["resign"]
    assert "has not returned" in caplog.text
    beginning, end = itertools.islice(client.election("e").observe(0, timeout=PATIENCE), 2)
    assert isinstance(beginning, Leader)
    assert isinstance(end, Vacancy)
    assert end.how == "expired"


def test_closing_the_client_ends_a_term_that_has_no_body(dsn: str, owner: psycopg.Connection) -> None:
    with dblock.Client(dsn, presence=None, patience=PATIENCE) as client:
        client.election("e", ttl=60).campaign()
    assert owner.execute("SELECT how FROM terms").fetchall() == [("resigned",)]


def test_closing_the_client_waits_for_the_body(dsn: str) -> None:
    order: list[str] = []
    with dblock.Client(dsn) as other:
        client = dblock.Client(dsn)
        election = client.election("e")
        led = threading.Event()

        def body(term: Term) -> None:
            led.set()
            term.wait(PATIENCE)
            seen = other.election("e").leader()
            order.append("leads" if seen else "released")

        thread = threading.Thread(target=lambda: election.run(body))
        thread.start()
        led.wait(PATIENCE)
        client.close()
        order.append("closed")
        thread.join(PATIENCE)
        assert order == ["leads", "closed"]
        assert [how for how, _ in log(other)] == ["leads", "resigned"]


def test_run_returns_what_the_body_returns_by_itself(client: dblock.Client) -> None:
    assert client.election("e").run(lambda term: 41) == 41


def test_stop_ends_a_candidate_that_waits(candidates: Callable[..., Candidate], owner: psycopg.Connection) -> None:
    candidates("a").led.wait(PATIENCE)
    waits = candidates("b")
    eventually(lambda: waiting(owner) == 1)
    waits.close()
    assert waiting(owner) == 0
    assert waits.terms == []


def test_stop_that_comes_with_the_term_ends_it(client: dblock.Client) -> None:
    election: Any = client.election("e")
    campaign = election._flows.campaign

    def stopped(*options: Any) -> Any:
        lease = yield from campaign(*options)
        election.stop()
        return lease

    election._flows.campaign = stopped
    assert election.run(lambda term: term.ending.is_set()) is None, "the body was not asked to return"


@pytest.mark.second_stage
def test_candidate_whose_lease_is_over_when_its_term_begins_campaigns_again(client: dblock.Client) -> None:
    election: Any = client.election("e")
    acquire = election._acquire
    tokens: list[int] = []

    def acquired(*options: Any) -> Any:
        lease = acquire(*options)
        if not tokens:
            lease.remaining = lambda: 0.0
        tokens.append(lease.token)
        return lease

    election._acquire = acquired
    with election.lead(PATIENCE) as term:
        assert [term.token] == tokens[1:]


def test_campaign_of_a_candidate_that_is_stopped_says_so(client: dblock.Client, owner: psycopg.Connection) -> None:
    with client.election("e").lead():
        election = client.election("e")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(election.campaign)
            eventually(lambda: owner.execute("SELECT FROM lock_tickets").fetchall())
            election.stop()
            with pytest.raises(dblock.DblockError, match="was stopped"):
                waiting.result(PATIENCE)


@pytest.mark.second_stage
def test_callbacks_come_in_pairs_once_for_each_term(client: dblock.Client) -> None:
    calls: list[tuple[str, int]] = []
    runs: list[int] = []
    election = client.election(
        "e",
        ttl=1,
        on_started=lambda term: calls.append(("started", term.token)),
        on_stopped=lambda term: calls.append(("stopped", term.token)),
    )

    def body(term: Term) -> str | None:
        runs.append(term.token)
        if len(runs) == 1:
            raise ValueError("broken")
        if len(runs) == 2:
            client._runtime.keepalive.discard(term._state)  # as if its renewals failed
            term.lost.wait(PATIENCE)
            return None
        if len(runs) == 3:
            election.resign()
            return None
        return "done"

    assert election.run(body) == "done"
    assert calls == [(what, token) for token in runs for what in ("started", "stopped")]
    assert [how for how, _ in log(client)][1::2] == ["failed", "expired", "resigned", "resigned"]


def test_callback_that_fails_at_the_start_ends_the_term(client: dblock.Client) -> None:
    stopped: list[int] = []

    def fail(term: Term) -> None:
        raise ValueError("not ready")

    election = client.election("e", on_started=fail, on_stopped=lambda term: stopped.append(term.token))
    with pytest.raises(ValueError, match="not ready"), election.lead():
        raise AssertionError("the body ran")
    assert len(stopped) == 1
    assert [how for how, _ in log(client)] == ["leads", "failed"]


@pytest.mark.second_stage
@pytest.mark.alone
def test_leader_is_asked_and_answers_within_five_microseconds(client: dblock.Client) -> None:
    """In the time of a core, to which a busy machine adds little."""
    election = client.election("e")
    with election.lead():
        times = []
        for _ in range(20):
            began = time.thread_time()
            for _ in range(500):
                election.is_leader()
            times.append((time.thread_time() - began) / 500)
        assert min(times) < 5e-6, times


@pytest.mark.second_stage
def test_leader_knows_of_its_loss_before_the_lock_is_free(client: dblock.Client, owner: psycopg.Connection) -> None:
    election = client.election("e", ttl=2)
    with pytest.raises(dblock.LeaseLost), election.lead() as term:
        client._runtime.keepalive.discard(term._state)
        while election.is_leader():
            ((free,),) = owner.execute(
                "SELECT expires_at <= clock_timestamp() FROM distributed_locks WHERE name = 'election:e'"
            ).fetchall()
            assert not (free and election.is_leader()), "believed while another could be granted the lock"


def test_transfer_names_the_next_leader(
    candidates: Callable[..., Candidate], owner: psycopg.Connection, client: dblock.Client
) -> None:
    first = candidates("a")
    first.led.wait(PATIENCE)
    others = [candidates(name) for name in ("b", "c")]
    eventually(lambda: waiting(owner) == 2)
    third = candidates("d")
    eventually(lambda: waiting(owner) == 3)
    seen_by_new: list[int] = []
    third.body = recording(first, seen_by_new)
    client.election("e").transfer(to="d")
    eventually(lambda: seen_by_new)
    assert seen_by_new == [0], "the old body ran when the new one began"
    assert not any(one.terms for one in others)
    assert log(client) == [("leads", "a"), ("transferred", "a"), ("leads", "d")]


def test_transfer_to_an_absent_candidate_is_refused(client: dblock.Client) -> None:
    election = client.election("e")
    with pytest.raises(dblock.TransferRefused, match="there is no leader"):
        election.transfer(to="b")
    with election.lead() as term:
        with pytest.raises(dblock.TransferRefused, match="no candidate of that name") as refused:
            election.transfer(to="b")
        assert refused.value.why == "absent"
        assert term.ending_reason is None


@pytest.mark.second_stage
def test_leader_whose_term_the_log_does_not_have_ends_it(client: dblock.Client, owner: psycopg.Connection) -> None:
    """A promoted standby may have received the grant and its renewals, and not the beginning of the term."""
    election = client.election("e")
    with election.lead() as term:
        owner.execute("DELETE FROM terms")
        assert term.wait(PATIENCE)
        assert term.ending_reason == "over"
        assert term.remaining() > 0, "the lock is still held, so that no other candidate leads"
    assert not election.is_leader()
    with election.lead(PATIENCE):
        assert [how for how, _ in log(client)] == ["leads"]


@pytest.mark.second_stage
def test_rolling_deploy_changes_the_leader_once(
    candidates: Callable[..., Candidate], owner: psycopg.Connection, client: dblock.Client
) -> None:
    """Three replicas of version 1.9 are replaced one by one by version 1.10: the first new one leads, and stays."""
    old = [candidates(f"old-{n}", version="1.9") for n in range(3)]
    eventually(lambda: waiting(owner) == 2 and any(one.led.is_set() for one in old))
    leading = next(one for one in old if one.led.is_set())
    new = candidates("new-0", version="1.10")
    new.led.wait(PATIENCE)
    for step in (1, 2):
        old[step].close()
        candidates(f"new-{step}", version="1.10")
        eventually(lambda: waiting(owner) >= 3)
    old[0].close()
    eventually(lambda: waiting(owner) == 2)
    holder = leading.client._runtime.flows.holder_name()
    assert log(client) == [("leads", holder), ("outranked", holder), ("leads", "new-0")]


@pytest.mark.second_stage
def test_lower_priority_never_takes_over_from_a_higher_one(
    candidates: Callable[..., Candidate], owner: psycopg.Connection
) -> None:
    high = candidates("high", priority=5)
    high.led.wait(PATIENCE)
    low = [candidates(f"low-{n}") for n in range(2)]
    eventually(lambda: waiting(owner) == 2)
    standby = candidates("standby", priority=5)
    eventually(lambda: waiting(owner) == 3)
    high.close()
    standby.led.wait(PATIENCE)
    assert not any(one.terms for one in low)


@pytest.mark.second_stage
def test_body_that_keeps_failing_steps_back_behind_the_others(
    candidates: Callable[..., Candidate], owner: psycopg.Connection
) -> None:
    failing = candidates("a", priority=9)
    failing.led.wait(PATIENCE)
    healthy = candidates("b")
    eventually(lambda: waiting(owner) == 1)

    def fail(term: Term) -> None:
        raise ValueError("broken")

    failing.body = fail
    failing.election.resign()
    eventually(lambda: len(failing.terms) == 4)  # it led once, and failed three times
    eventually(lambda: healthy.led.is_set() and waiting(owner) == 1)
    time.sleep(1.2)
    assert healthy.led.is_set(), "the failing candidate took over again, by its priority"
    assert len(failing.terms) == 4


def test_fence_keeps_the_next_term_from_beginning(client: dblock.Client, dsn: str, owner: psycopg.Connection) -> None:
    with (
        psycopg.connect(dsn) as connection,
        dblock.Client(dsn) as other,
        pytest.raises(dblock.LeaseLost),
        client.election("e").lead() as term,
    ):
        with term.fence(connection):
            owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")  # as after a freeze
            with pytest.raises(dblock.LockTimeout):
                other.election("e").campaign(0.2)
            connection.commit()
        with other.election("e").lead(), pytest.raises(dblock.LeaseLost):
            term.fence(connection)


def test_observer_sees_every_term_and_vacancy_in_order(client: dblock.Client, dsn: str) -> None:
    seen: list[Leader | Vacancy] = []
    ended = threading.Event()

    def observe() -> None:
        with dblock.Client(dsn) as own:
            for event in own.election("e").observe(0):
                seen.append(event)
                if len(seen) == 20:
                    break
        ended.set()

    thread = threading.Thread(target=observe)
    thread.start()
    election = client.election("e")
    tokens = []
    for _ in range(10):
        with election.lead() as term:
            tokens.append(term.token)
    assert ended.wait(PATIENCE)
    thread.join()
    assert [(type(one), one.token) for one in seen] == [(kind, t) for t in tokens for kind in (Leader, Vacancy)]
    moments = [one.since for one in seen]
    assert moments == sorted(moments)
    fifth = seen[8]
    assert list(election.observe(fifth, timeout=0)) == seen[9:]
    assert list(election.observe(fifth.token, timeout=0)) == seen[9:]
    assert list(election.observe(seen[9], timeout=0)) == seen[10:]
    assert list(election.observe(timeout=0)) == seen[-1:], "without a start, the present state"
    assert list(client.election("new").observe(timeout=0)) == []


def test_observer_reports_a_death_without_a_successor(client: dblock.Client, owner: psycopg.Connection) -> None:
    events = client.election("e").observe(0, timeout=PATIENCE)
    with pytest.raises(dblock.LeaseLost), client.election("e").lead() as term:
        assert isinstance(next(events), Leader)
        owner.execute("UPDATE distributed_locks SET expires_at = clock_timestamp()")
        vacancy = next(events)
        assert isinstance(vacancy, Vacancy)
        assert (vacancy.token, vacancy.how) == (term.token, "expired")


def test_observer_reports_an_error_that_waiting_does_not_help(client: dblock.Client) -> None:
    flows = client.election("e")._flows
    asking = flows.next_events(Position(0), None)
    next(asking)
    with pytest.raises(dblock.AccessDenied):
        asking.throw(dblock.AccessDenied("no"))


def test_observer_is_told_that_terms_are_forgotten(client: dblock.Client, owner: psycopg.Connection) -> None:
    with client.election("e").lead():
        owner.execute("UPDATE terms SET number = 2")
        with pytest.raises(dblock.TermsForgotten, match="since token 1"):
            next(client.election("e").observe(1))
        with pytest.raises(dblock.InvalidArgument):
            next(client.election("e").observe("1"))  # type: ignore[arg-type]


def test_role_that_may_see_reads_the_leader_and_changes_nothing(
    client: dblock.Client, dsn: str, role: str, owner: psycopg.Connection
) -> None:
    for statement in privileges.grant_statements(role, "dblock", ["see"]):
        owner.execute(statement.encode())
    seeing = psycopg.conninfo.make_conninfo(dsn, user=role, password="app")
    with client.election("e", value=7).lead() as term, psycopg.connect(seeing, autocommit=True) as connection:
        row = connection.execute("SELECT token, value FROM dblock.election_leader('e')").fetchone()
        assert row == (term.token, 7)
        assert connection.execute("SELECT json_array_length(terms) FROM dblock.list_terms('e')").fetchone() == (1,)
        for call in ("publish_value('e', 1, '1')", "transfer_term('e', 1, 'x')", "end_term('e', 1)"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(f"SELECT dblock.{call}".encode())


@pytest.mark.second_stage
def test_candidate_whose_ticket_was_lost_queues_again(
    candidates: Callable[..., Candidate], owner: psycopg.Connection
) -> None:
    first = candidates("a")
    first.led.wait(PATIENCE)
    second = candidates("b")
    eventually(lambda: waiting(owner) == 1)
    with measured() as lateness:
        owner.execute(
            "SELECT pg_terminate_backend(p.session) FROM lock_presence AS p JOIN lock_tickets USING (presence)"
        )
        owner.execute("DELETE FROM lock_tickets")
        began = time.monotonic()
        eventually(lambda: waiting(owner) == 1)
        took = time.monotonic() - began
        assert took < 1.2 + 3 * lateness(), took
    first.close()
    second.led.wait(PATIENCE)


@pytest.mark.parametrize(
    "options",
    [{"priority": 1.5}, {"priority": 2**40}, {"version": "1.x"}, {"version": ""}, {"ttl": 0}, {"on_started": 1}],
)
def test_options_outside_their_limits_are_refused(client: dblock.Client, options: dict[str, Any]) -> None:
    with pytest.raises(dblock.InvalidArgument):
        client.election("e", **options)
    with pytest.raises(dblock.InvalidArgument):
        client.election("")


def test_message_about_a_value_names_the_election(client: dblock.Client) -> None:
    with pytest.raises(dblock.InvalidArgument, match="The value of election 'e' is not JSON"):
        client.election("e", value=object())
    with client.election("e").lead() as term, pytest.raises(dblock.InvalidArgument, match="The value of election 'e'"):
        term.publish(object())


def test_coroutine_function_is_refused_as_a_body(client: dblock.Client) -> None:
    async def body(term: object) -> None: ...

    with pytest.raises(
        dblock.InvalidArgument, match=r"election 'e' is a coroutine function\. Use AsyncClient\.election"
    ):
        client.election("e").run(body)
    assert client.election("e").leader() is None


def test_timeout_of_a_campaign_is_reported_as_it_was_given(client: dblock.Client) -> None:
    with client.election("e").lead(), pytest.raises(dblock.LockTimeout, match=r"within 0\.1 s"):
        client.election("e").campaign(timeout=0.1)
