"""The dashboard in a real browser: with and without JavaScript, live, by keyboard, and when the database is away."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from dblock.server.access import credential
from tests.dblock.server.browsing import (
    WATCH_THE_BANNER,
    browser,
    failing_database,
    needs_browser,
    running,
    violations,
)
from tests.dblock.server.scene import Scene, build
from tests.support.eventually import eventually
from tests.support.machine import measured

pytestmark = [needs_browser, pytest.mark.second_stage]

PAGES = {
    "locks": "",
    "lock": "lock?name=billing%3Aclose",
    "shared": "lock?name=cache%3Aconfig",
    "told": "lock?name=report%3Aweekly",
    "graph": "graph",
    "schedules": "schedules",
    "losses": "losses",
    "break": "break?name=billing%3Aclose",
}

PICTURES = {"locks": ("light", "dark"), "lock": ("dark",), "break": ("light",), "graph": ("dark",)}
FOLDER = os.environ.get("DBLOCK_PICTURES", "")
"""The pictures of the guide, and the folder that they are written to, if there is one."""

WAIT = 30_000
"""Milliseconds that a browser waits for something that comes at once, on a machine that is not busy."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as opened:
        yield opened


@pytest.fixture
def scene(dsn: str) -> Iterator[Scene]:
    made = build(dsn)
    yield made
    made.close()


@pytest.fixture
def new_page(chromium: Any) -> Iterator[Any]:
    """Opens pages that fail the test if they report an error, violate the policy, or ask another host."""
    contexts: list[Any] = []
    troubles: list[str] = []

    def make(**options: Any) -> Any:
        context = chromium.new_context(viewport={"width": 1200, "height": 760}, **options)
        context.set_default_timeout(WAIT)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
        return page

    hosts: set[str | None] = set()
    yield make
    for context in contexts:
        context.close()
    assert [trouble for trouble in troubles if "Failed to load resource" not in trouble] == []
    assert hosts <= {"127.0.0.1", "localhost"}, "no request leaves the host"


def wait_for_ticks(page: Any, count: int) -> None:
    """Wait until the page has taken this many more ticks."""
    now = int(page.evaluate("document.body.dataset.ticks ?? 0"))
    wait_for(page, f"Number(document.body.dataset.ticks ?? 0) >= {now + count}")


def wait_for(page: Any, expression: str) -> None:
    """Wait until an expression is true. The policy of the pages forbids Playwright's own way, which compiles text."""
    eventually(lambda: page.evaluate(expression), expression, 3 * WAIT / 1000)


@pytest.mark.usefixtures("scene")
def test_every_page_is_accessible_in_light_and_dark(dsn: str, new_page: Any) -> None:
    tokens = (credential("kim", "break", "k" * 20),)
    with running(dsn, 0.2, credentials=tokens) as server:
        page = new_page()
        page.goto(server.address)
        assert violations(page) == [], "the sign-in page"
        page.fill("#token", "k" * 20)
        page.click("main button")
        for name, path in (*PAGES.items(), ("unknown", "lock?name=unknown")):
            page.goto(server.address + path)
            if page.query_selector("[data-live]"):
                page.wait_for_selector("[data-live].on", state="attached")
            assert violations(page) == [], name
            for scheme in PICTURES.get(name, ()) if FOLDER else ():
                page.emulate_media(color_scheme=scheme)
                page.evaluate("document.querySelectorAll('.fresh').forEach((row) => row.classList.remove('fresh'))")
                page.screenshot(path=Path(FOLDER) / f"dashboard-{name}-{scheme}.png", full_page=name != "locks")
                page.emulate_media(color_scheme="light")
        page.goto(server.address)
        page.keyboard.press("?")
        assert violations(page) == [], "the help"


@pytest.mark.usefixtures("scene")
@pytest.mark.parametrize("script", [True, False], ids=["with", "without"])
def test_every_page_works_with_and_without_javascript_under_a_prefix(dsn: str, new_page: Any, script: bool) -> None:
    with running(dsn, 0.2, prefix="/any/prefix") as server:
        page = new_page(java_script_enabled=script)
        for name, path in PAGES.items():
            page.goto(server.address + path)
            assert len(page.inner_text("main")) > 60, f"{name} is empty"
            if script and page.query_selector("[data-live]"):
                page.wait_for_selector("[data-live].on", state="attached")
        page.goto(server.address)
        page.fill("#q", "stock:*")
        page.click(".search button")
        page.wait_for_url("**/any/prefix/?q=stock*")
        assert page.locator("[data-rows] tr").count() == 2
        page.click("text=Deadline in")
        page.wait_for_selector("th[aria-sort]")
        assert page.locator("[data-rows] tr").count() == 2


@pytest.mark.parametrize("script", [True, False])
def test_break_works_with_a_reason_and_shows_whether_it_helped(
    dsn: str, scene: Scene, new_page: Any, script: bool
) -> None:
    tokens = (credential("kim", "break", "k" * 20),)
    with running(dsn, 0.2, credentials=tokens) as server:
        page = new_page(java_script_enabled=script)
        page.goto(server.address + "lock?name=billing%3Aclose")
        page.fill("#token", "k" * 20)
        page.click("main button")
        page.click("text=Break…")
        assert "Partly safe" in page.inner_text("main")
        page.check("input[value=free]")
        page.click("button.danger")
        assert "Did it help" not in page.inner_text("main"), "the reason is required"
        page.fill("#reason", "stuck since midnight")
        page.click("button.danger")
        page.wait_for_selector("text=Did it help?")
        assert "Yes: token" in page.inner_text("main")
        assert "stuck since midnight" in page.inner_text("main")
        event, actor = scene.call("SELECT event, actor FROM list_history('billing:close', 1)")
        assert event == "forced_now"
        assert actor.startswith("kim at the dashboard")


def test_keyboard_alone_finds_and_opens_a_lock(dsn: str, scene: Scene, new_page: Any) -> None:
    with running(dsn, 0.2) as server:
        page = new_page()
        page.goto(server.address)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.keyboard.press("?")
        assert page.is_visible("dialog")
        page.keyboard.press("Escape")
        assert not page.is_visible("dialog")
        page.keyboard.press("/")
        page.keyboard.type("nightly:*")
        page.keyboard.press("Enter")
        page.wait_for_url("**q=nightly*")
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("k")
        assert page.evaluate("document.activeElement.textContent") == "nightly:01"
        page.keyboard.press("Enter")
        page.wait_for_url("**lock?name=nightly*")
        page.keyboard.press("g")
        page.keyboard.press("w")
        page.wait_for_url("**/graph")
        page.goto(server.address + "break?name=nightly%3A01")
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == "reason":
                break
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", "the focus is visible"
        page.keyboard.type("by keyboard")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=Did it help?")
    assert scene.call("SELECT reason FROM list_history('nightly:01', 1)") == ["by keyboard"]


def test_focus_scroll_selection_and_open_rows_survive_a_hundred_ticks(dsn: str, new_page: Any) -> None:
    with psycopg.connect(dsn, autocommit=True, options="-c search_path=dblock") as session:
        session.execute(
            "SELECT count(*) FROM generate_series(1, 150) AS n, try_acquire('lock:' || lpad(n::text, 4, '0'), '1 h')"
        )
        stop = threading.Event()

        def churn() -> None:
            with psycopg.connect(dsn, autocommit=True, options="-c search_path=dblock") as other:
                turn = 0
                while not stop.is_set():
                    turn += 1
                    other.execute("SELECT release(name, token) FROM list_locks('lock:%', NULL, false, 9)")
                    other.execute("SELECT count(*) FROM generate_series(1, 9) AS n, try_acquire('lock:000' || n)")
                    other.execute("SELECT try_acquire('new:' || %s, '2 s')", [turn])
                    stop.wait(0.05)

        with running(dsn, 0.05) as server:
            page = new_page()
            page.goto(server.address + "?sort=name&per=1000")
            wait_for_ticks(page, 1)
            page.evaluate("window.scrollTo(0, 1500)")
            link = page.locator('[data-key="lock:0050"] a')
            link.evaluate("(element) => element.focus({ preventScroll: true })")
            page.evaluate(
                """() => {
                  const cell = document.querySelector('[data-key="lock:0051"] .holder');
                  getSelection().selectAllChildren(cell);
                  const row = document.querySelector('[data-key="lock:0050"]');
                  window.kept = { row, top: row.getBoundingClientRect().top };
                }"""
            )
            selected = page.evaluate("String(getSelection())")
            busy = threading.Thread(target=churn)
            busy.start()
            try:
                wait_for_ticks(page, 100)
            finally:
                stop.set()
                busy.join()
            assert page.evaluate("document.activeElement.textContent") == "lock:0050"
            assert page.evaluate("window.kept.row === document.querySelector('[data-key=\"lock:0050\"]')")
            moved = page.evaluate("kept.row.getBoundingClientRect().top - kept.top")
            assert abs(moved) < 4, "what is on the screen stays there, though rows above come and go"
            assert page.evaluate("String(getSelection())") == selected != ""
            assert page.evaluate("performance.getEntriesByName('dblock-tick').length") <= 100, "a page does not grow"


def test_open_details_and_text_in_a_field_survive_reading_a_page_again(
    dsn: str, scene: Scene, new_page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dblock.server.dashboard.stream.PAGE_LASTS", 1)
    for number in range(12):
        scene.session.execute(f"CREATE TABLE public.t{number} ()".encode())
    with running(dsn, 0.1) as server:
        page = new_page()
        page.goto(server.address + "lock?name=billing%3Aclose")
        page.click("summary")
        page.evaluate("window.kept = document.querySelector('details')")
        scene.wait("billing:close", "a new waiter")
        scene.keep()
        page.wait_for_selector("text=a new waiter")
        assert page.evaluate("window.kept.open && window.kept.isConnected")
        page.goto(server.address + "graph")
        page.focus("#q")
        page.keyboard.type("half a pat")
        scene.wait("nightly:00", "another new waiter")
        scene.keep()
        page.wait_for_selector("svg >> text=nightly:00", state="attached")
        page.keyboard.type("tern")
        assert page.input_value("#q") == "half a pattern"


@pytest.mark.parametrize("how", ["silent", "killed"])
def test_banner_tells_within_three_seconds_that_the_database_is_gone(dsn: str, new_page: Any, how: str) -> None:
    """The bound is three seconds on a machine that is not busy: how late it was is added."""
    with failing_database(how, dsn) as (address, fail, recover), running(address) as server:
        with psycopg.connect(address, autocommit=True, options="-c search_path=dblock") as session:
            session.execute("SELECT try_acquire('a', '10 min', 'ann')")
        page = new_page()
        page.goto(server.address)
        page.wait_for_selector("[data-live].on", state="attached")
        wait_for_ticks(page, 1)
        page.evaluate(WATCH_THE_BANNER)
        with measured() as lateness:
            began = time.time()
            fail()
            page.wait_for_selector("[data-banner]:not([hidden])")
            shown, late = page.evaluate("[window.shownAt / 1000, window.late / 1000]")
            assert shown - began <= 3 + 3 * lateness() + late
        wait_for(page, "document.querySelector('[data-banner]').textContent.includes('database does not reply')")
        first = page.inner_text("[data-banner]")
        assert " old." in first
        assert violations(page) == []
        page.keyboard.press("j")
        assert page.evaluate("document.activeElement.textContent") == "a", "the keys work"
        wait_for(page, f"document.querySelector('[data-banner]').textContent !== {first!r}")
        recover()
        page.wait_for_selector("[data-banner]", state="hidden")
        page.wait_for_selector("[data-live].on", state="attached")


def test_tab_that_slept_catches_up_in_one_request(dsn: str, new_page: Any) -> None:
    with psycopg.connect(dsn, autocommit=True, options="-c search_path=dblock") as session:
        session.execute("SELECT try_acquire('a', '10 min', 'ann')")
        with running(dsn, 0.1) as server:
            page = new_page()
            page.goto(server.address)
            wait_for_ticks(page, 2)
            hide = (
                "(hidden) => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
                " document.dispatchEvent(new Event('visibilitychange')); }"
            )
            page.evaluate(hide, True)
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            session.execute("SELECT release('a', token), try_acquire('b', '10 min', 'bob') FROM holder('a')")
            eventually(lambda: not server.service.feed.watchers, "the end of the stream")
            page.evaluate(hide, False)
            page.wait_for_selector('[data-key="b"]')
            assert page.locator('[data-key="a"]').count() == 0
            assert len(asked) == 1, "one request"


@pytest.mark.alone
def test_tick_patches_a_thousand_locks_within_a_frame(dsn: str, new_page: Any) -> None:
    """Every lock is renewed before every tick. A tick that changes more is spread over several frames.

    The shortest of the heavy ticks is judged: other programs can only add to what a tick costs.
    """
    heavy = (
        "performance.getEntriesByName('dblock-tick').filter((one) => one.detail.times === 1000 && !one.detail.rows"
        " && one.detail.last).map((one) => one.duration)"
    )
    with psycopg.connect(dsn, autocommit=True, options="-c search_path=dblock") as session:
        session.execute("SELECT count(*) FROM generate_series(1, 1000) AS n, try_acquire('lock:' || n, '10 min')")
        with running(dsn, 0.3) as server:
            page = new_page()
            page.goto(server.address + "?per=1000&sort=name")
            wait_for_ticks(page, 1)
            assert page.locator("[data-rows] tr").count() == 1000
            page.evaluate("performance.clearMeasures()")
            while len(took := page.evaluate(heavy)) < 5:
                session.execute("UPDATE distributed_locks SET expires_at = expires_at + interval '1 s'")
                wait_for_ticks(page, 1)
            session.execute("UPDATE distributed_locks SET holder = 'the next holder'")
            page.wait_for_selector('[data-key="lock:1000"] >> text=the next holder')
            wait_for_ticks(page, 1)
            assert page.locator("text=the next holder").count() == 1000
    assert min(took) < 16, f"ticks took {sorted(round(one, 1) for one in took)} ms"


@pytest.mark.alone
def test_change_reaches_the_screen_within_a_second_and_a_half(dsn: str, new_page: Any) -> None:
    with psycopg.connect(dsn, autocommit=True, options="-c search_path=dblock") as session, running(dsn) as server:
        page = new_page()
        page.goto(server.address)
        page.wait_for_selector("[data-live].on", state="attached")
        for number in range(5):
            with measured() as lateness:
                session.execute("SELECT try_acquire('lock:' || %s, '1 min')", [number])
                began = time.monotonic()
                page.wait_for_selector(f'[data-key="lock:{number}"]')
                assert time.monotonic() - began <= 1.5 + 3 * lateness()


@pytest.mark.usefixtures("scene")
def test_link_of_another_site_finds_the_browser_signed_in(dsn: str, new_page: Any) -> None:
    """The browser sends no SameSite=Strict cookie for the link itself, so the sign-in page asks it to come again."""
    tokens = (credential("kim", "see", "k" * 20),)
    with running(dsn, 0.2, credentials=tokens, hosts=("localhost",)) as server:
        page = new_page()
        page.goto(server.address)
        page.fill("#token", "k" * 20)
        page.click("main button")
        page.wait_for_selector("[data-rows]")
        page.goto(f"http://localhost:{server.port}/static/icon.svg")
        page.evaluate(f"location.href = '{server.address}lock?name=gpu'")
        page.wait_for_url("**lock?name=gpu")
        page.wait_for_selector("text=3 of 3 permits")


def test_name_that_does_not_print_keeps_the_table_live(dsn: str, owner: psycopg.Connection, new_page: Any) -> None:
    """A row is found by the name itself, and not by the text that is shown for it."""
    name = "turned \u202e around\r\nnew 100%41 line"
    with running(dsn, 0.2) as server:
        page = new_page()
        page.goto(server.address)
        wait_for_ticks(page, 1)
        owner.execute("SELECT try_acquire(%s, holder => 'first')", [name])
        wait_for(page, "document.querySelector('[data-rows]').textContent.includes('first')")
        owner.execute("SELECT release(%(name)s, token) FROM holder(%(name)s)", {"name": name})
        owner.execute("SELECT try_acquire('another', holder => 'second')")
        wait_for(page, "document.querySelector('[data-rows]').textContent.includes('second')")
        wait_for(page, "!document.querySelector('[data-rows]').textContent.includes('first')")


@pytest.mark.parametrize("width", [400, 1200])
def test_long_name_takes_three_lines_of_the_table(
    width: int, dsn: str, owner: psycopg.Connection, new_page: Any
) -> None:
    owner.execute("SELECT try_acquire(repeat('x', 400), holder => 'a')")
    owner.execute("SELECT try_acquire('y', holder => 'a')")
    with running(dsn, 0.2) as server:
        page = new_page()
        page.set_viewport_size({"width": width, "height": 760})
        page.goto(server.address)
        long, short = (row.bounding_box()["height"] for row in page.query_selector_all("[data-rows] tr"))
        assert short < long < 3 * short
