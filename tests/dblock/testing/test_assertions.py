"""assert_order and no_waits: what they accept, and what their messages name."""

from __future__ import annotations

import re
import threading

import pytest

import dblock
from dblock.testing import assert_order, no_waits
from tests.support.eventually import eventually


def test_order_of_the_grants_is_accepted_by_lock_or_by_holder(holder: dblock.Client, other: dblock.Client) -> None:
    with holder.lock("a"), other.lock("b"):
        pass
    with other.lock("a"):
        pass
    assert_order(["a", "b", "a"])
    assert_order(["holder: a", "b", "other: a"])


def test_other_order_is_refused_with_holder_token_and_line(holder: dblock.Client) -> None:
    with holder.lock("a") as lease:
        pass
    for expected in (["b"], [], ["a", "a"], ["other: a"]):
        with pytest.raises(AssertionError) as raised:
            assert_order(expected)
        found = re.search(r"1\. holder: 'a', token (\d+), acquired at (.+):\d+ in test_other_order", str(raised.value))
        assert found
        assert int(found[1]) == lease.token
        assert found[2].endswith("test_assertions.py")


def test_order_without_any_grant_is_refused(holder: dblock.Client) -> None:
    assert_order([])
    with pytest.raises(AssertionError, match="None was granted"):
        assert_order(["a"])


@pytest.mark.parametrize("wrong", ["a", [5]])
def test_order_of_anything_but_names_is_refused(holder: dblock.Client, wrong: list[str]) -> None:
    with holder.lock("a"):
        pass
    with pytest.raises(dblock.InvalidArgument, match="takes a list of the names of locks"):
        assert_order(wrong)


def test_block_without_waits_is_accepted(holder: dblock.Client) -> None:
    with no_waits(), holder.lock("a"):
        pass


def test_wait_is_refused_with_holder_token_and_line(holder: dblock.Client, other: dblock.Client) -> None:
    with holder.lock("a") as lease, pytest.raises(AssertionError) as raised, no_waits():
        assert other.lock("a").try_acquire() is None
    asked = r"other asked for 'a' at .+test_assertions.py:\d+ in test_wait_is_refused.+ \(busy after"
    assert re.search(asked, str(raised.value))
    assert f"held by: holder: 'a', token {lease.token}, acquired at " in str(raised.value)


def test_assertion_outside_of_a_watched_test_says_what_is_missing() -> None:
    with pytest.raises(dblock.DblockError, match="dblock_client"):
        assert_order([])


def test_wait_that_lasts_is_refused_with_the_holder_at_its_begin(holder: dblock.Client, other: dblock.Client) -> None:
    with holder.lock("a"):
        pass
    lease = holder.lock("a", ttl=300).acquire()
    got: list[dblock.Lease] = []
    thread = threading.Thread(target=lambda: got.append(other.lock("a").acquire(timeout=60)))
    with pytest.raises(AssertionError) as raised, no_waits():
        thread.start()
        eventually(other.lock("a").queue, "a waiter")
    assert "(still waiting)" in str(raised.value)
    assert f"held by: holder: 'a', token {lease.token}, " in str(raised.value)
    with pytest.raises(AssertionError) as later, no_waits():
        lease.release()
        thread.join(30)
        got[0].release()
        assert other.lock("a").try_acquire().release()  # type: ignore[union-attr]
    assert f"held by: holder: 'a', token {lease.token}, " in str(later.value), "not the later holders"
