"""The pages of the dashboard without a browser: what they show, who sees them, and what a break does."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Iterator
from html.parser import HTMLParser
from urllib.parse import urlencode

import httpx
import pytest

from dblock.server.access import credential
from tests.dblock.server.conftest import Http, serving
from tests.dblock.server.scene import Scene, build

PAGES = [
    "/",
    "/?show=awaited&sort=left&down=1&q=billing:*&per=5&page=2",
    "/lock?name=billing%3Aclose",
    "/lock?name=cache%3Aconfig",
    "/lock?name=gpu",
    "/lock?name=tenant%2F42+%3Cb%3E%25",
    "/graph",
    "/graph?q=stock%3A*&all=1",
    "/schedules",
    "/losses",
    "/break?name=billing%3Aclose",
]

POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"

TOKENS = {"see": "s" * 20, "lock": "l" * 20, "break": "b" * 20}


@pytest.fixture
def scene(dsn: str) -> Iterator[Scene]:
    """Locks of every kind."""
    made = build(dsn)
    yield made
    made.close()


@pytest.fixture
async def guarded(dsn: str) -> AsyncIterator[Http]:
    """A server with a token for each role."""
    credentials = tuple(credential(f"kim-{role}", role, token) for role, token in TOKENS.items())
    async with serving(dsn, credentials=credentials) as client:
        yield client


class Page(HTMLParser):
    """A page as text, with its elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(html)
        self.words = " ".join(self.words.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data

    def names(self) -> list[str]:
        """The names of the locks in the table, in order."""
        return [found["data-key"] or "" for tag, found in self.elements if tag == "tr" and "data-key" in found]


async def read(http: httpx.AsyncClient, path: str, status: int = 200) -> Page:
    response = await http.get(path)
    assert response.status_code == status, response.text
    return Page(response.text)


@pytest.mark.usefixtures("scene")
async def test_every_page_is_complete_html_with_a_strict_policy(http: Http) -> None:
    for path in (*PAGES, "/lock?name=unknown", "/break?name=unknown"):
        response = await http.get(path)
        assert response.status_code == 200 or "unknown" in path, f"{path}: {response.text}"
        assert response.headers["content-security-policy"] == POLICY
        page = Page(response.text)
        for tag, attributes in page.elements:
            assert "style" not in attributes, f"{path}: an inline style at {tag}"
            assert not any(name.startswith("on") for name in attributes), f"{path}: an inline script at {tag}"
            assert tag != "style"
            assert tag != "script" or attributes.get("src"), path
            for name in ("href", "src", "action"):
                target = attributes.get(name) or ""
                assert "//" not in target, f"{path}: {target} leaves the host"
        assert ("main", {"id": "main", "tabindex": "-1"}) in page.elements
        assert "<b>%" not in response.text, "the name of a lock is escaped"


async def test_table_shows_what_an_operator_asks_first(http: Http, scene: Scene) -> None:
    response = await http.get("/")
    page = Page(response.text)
    assert set(page.names()) >= {"billing:close", "export:monthly", "stock:berlin", "cache:config", "gpu"}
    assert not any("#" in key for key in page.names()), "a share is no row of its own"
    row = re.search(r'<tr data-key="billing:close".*?</tr>', response.text, re.DOTALL)
    assert row
    words = Page(row[0]).words
    assert "billing@worker-1:8801" in words
    assert "alive" in words
    assert "9 min" in words, "the deadline"
    assert " 4 " in words, "the waiters"
    gone = re.search(r'<tr data-key="export:monthly".*?</tr>', response.text, re.DOTALL)
    assert gone
    assert "gone" in Page(gone[0]).words
    assert "3 readers" in page.words
    assert "3 of 3 permits" in page.words


@pytest.mark.usefixtures("scene")
async def test_filters_search_sort_and_pages_are_plain_parameters(http: Http) -> None:
    assert set((await read(http, "/?show=stuck")).names()) == {"stock:berlin", "stock:paris"}
    assert (await read(http, "/?show=gone")).names() == ["export:monthly"]
    assert (await read(http, "/?show=forced")).names() == ["report:weekly"]
    assert set((await read(http, "/?show=shared")).names()) == {"cache:config", "gpu"}
    assert (await read(http, "/?q=nightly:*&sort=name")).names() == [f"nightly:{number:02}" for number in range(6)]
    assert (await read(http, "/?q=WORKER-2&sort=name")).names() == ["export:monthly", "nightly:02"]
    names = (await read(http, "/?sort=name")).names()
    assert names == sorted(names)
    assert (await read(http, "/?sort=name&down=1")).names() == names[::-1]
    assert (await read(http, "/?sort=name&per=5&page=2")).names() == names[5:10]
    assert (await read(http, "/?sort=waiting")).names()[0] == "billing:close"
    assert set((await read(http, "/")).names()[:2]) == {"stock:berlin", "stock:paris"}, "trouble comes first"


@pytest.mark.parametrize("query", ["show=x&sort=y&page=-1&per=0", "page=99999999999999999", "q=%00%ff&per=%C2%B2"])
async def test_table_ignores_parameters_that_make_no_sense(http: Http, query: str) -> None:
    await read(http, f"/?{query}")


@pytest.mark.usefixtures("scene")
async def test_page_of_a_lock_shows_holder_reason_and_fences(http: Http) -> None:
    page = await read(http, "/lock?name=billing%3Aclose")
    for words in (
        "billing@worker-1:8801", "alive", "deadline in", "Queue 4", "billing@worker-5:7100", "invoices/2026-11",
        "this token", "public.mails table without a fence", "expired", "granted",
    ):  # fmt: skip
        assert words in page.words, words
    assert ("rect", "bar now") in [(tag, (found.get("class") or "")) for tag, found in page.elements]
    assert "A cycle" in (await read(http, "/lock?name=stock%3Aparis")).words
    assert "is gone" in (await read(http, "/lock?name=export%3Amonthly")).words
    shared = await read(http, "/lock?name=cache%3Aconfig")
    assert "Shares 3" in shared.words
    assert "deploy@ci:77 write" in shared.words
    assert "Shares 3 of 3" in (await read(http, "/lock?name=gpu")).words
    await read(http, "/lock?name=none", 404)
    await read(http, "/lock", 404)


@pytest.mark.usefixtures("scene")
async def test_graph_marks_its_cycles(http: Http) -> None:
    response = await http.get("/graph")
    assert "these holders wait for each other" in response.text
    assert response.text.count('class="lock stuck"') == 2
    assert 'href="./lock?name=stock%3Aparis"' in response.text
    picture = await http.get("/graph.svg")
    assert picture.headers["content-type"] == "image/svg+xml"
    assert "<style>" in picture.text


async def test_cycle_among_names_is_not_presented_as_proven(http: Http) -> None:
    for name, holder, waiter in (("x", "web", "worker"), ("y", "worker", "web")):
        assert (await http.post(f"/v1/locks/{name}", json={"holder": holder})).status_code == 200
        assert (await http.post(f"/v1/locks/{name}", json={"holder": waiter, "wait": 0.01})).status_code == 202
    for path in ("/lock?name=x", "/graph"):
        assert "It is no cycle if several processes share a name." in (await read(http, path)).words


@pytest.mark.usefixtures("scene")
async def test_losses_and_schedules_show_what_happened_before(http: Http) -> None:
    losses = await read(http, "/losses")
    assert "billing@worker-4:9120" in losses.words
    assert "the report hangs" in losses.words
    assert "scheduler" in (await read(http, "/schedules")).words


async def test_break_page_says_what_is_safe_and_what_is_not(http: Http, scene: Scene) -> None:
    page = await read(http, "/break?name=billing%3Aclose")
    assert "Safe: like a lease that expires" in page.words
    assert "Partly safe" in page.words
    assert "invoices/2026-11" in page.words
    assert "public.mails" in page.words
    assert "Queue 4" in page.words
    bare = await read(http, "/break?name=import%3Acustomers")
    assert "Partly safe" in bare.words, "a table has a fence"
    scene.session.execute("DROP SCHEMA fenced_store CASCADE")
    await serve_again(http)
    assert "Not safe" in (await read(http, "/break?name=import%3Acustomers")).words


async def test_page_of_a_lock_shows_who_told_its_holder_to_release_and_why(http: Http, scene: Scene) -> None:
    page = await read(http, "/lock?name=report%3Aweekly")
    assert "report@worker-3:5510 was told to release." in page.words
    assert re.search(
        r"in 3 min \d\d s at the latest\. Told [<0-9 s]+ ago by kim as \S+: “the report hangs”", page.words
    )
    asked = await read(http, "/break?name=report%3Aweekly")
    assert re.search(r"The holder was told already *By kim as \S+: the report hangs\.", asked.words)
    share, token = scene.call("SELECT name, token FROM list_locks('%%', 'gpu') WHERE head = 'gpu' LIMIT 1")
    scene.call("SELECT force_release(%s, %s, 'lou', 'too hot')", share, token)
    await serve_again(http)
    page = await read(http, "/lock?name=gpu")
    assert page.words.count("was told to release.") == 1
    assert re.search(r"by lou as \S+: “too hot”", page.words)
    scene.call("SELECT release('report:weekly', token) FROM holder('report:weekly')")
    await serve_again(http)
    assert "was told to release" not in (await read(http, "/lock?name=report%3Aweekly")).words


async def serve_again(http: Http) -> None:
    """Let the next page ask the database."""
    http.app.state.dashboard.reads.forget()


def form(name: str, token: int, **fields: str) -> tuple[str, dict[str, str]]:
    return "/break?" + urlencode({"name": name}), {"token": str(token), "how": "tell", "reason": "it hangs", **fields}


async def test_break_acts_on_one_token_and_records_who(guarded: Http, scene: Scene) -> None:
    token = scene.call("SELECT token FROM holder('import:customers')")[0]
    await guarded.post("/signin", data={"token": TOKENS["break"]})
    path, fields = form("import:customers", token - 1)
    assert (await guarded.post(path, data=fields)).status_code == 409, "another grant is left alone"
    assert scene.call("SELECT count(*) FROM list_history('import:customers') WHERE event LIKE 'forced%%'") == [0]
    path, fields = form("import:customers", token, reason=" ")
    refused = await guarded.post(path, data=fields)
    assert refused.status_code == 400
    assert "Give a reason" in refused.text
    path, fields = form("import:customers", token)
    told = await guarded.post(path, data=fields)
    assert told.status_code == 303
    shown = Page((await guarded.get("/" + told.headers["location"])).text)
    assert "Not yet: the holder was told to release" in shown.words
    path, fields = form("import:customers", token, how="free", reason="it hangs <3")
    freed = await guarded.post(path, data=fields)
    shown = Page((await guarded.get("/" + freed.headers["location"])).text)
    assert f"Yes: token {token} does not hold the lock any more" in shown.words
    event, actor, reason = scene.call("SELECT event, actor, reason FROM list_history('import:customers', 1)")
    assert (event, reason) == ("forced_now", "it hangs <3")
    assert actor.startswith("kim-break at the dashboard as ")


async def test_break_frees_one_share_of_a_shared_lock(http: Http, scene: Scene) -> None:
    token = scene.call("SELECT token FROM holder('gpu') ORDER BY token LIMIT 1")[0]
    path, fields = form("gpu", token, how="free")
    assert (await http.post(path, data=fields)).status_code == 303
    assert scene.call("SELECT count(*) FROM holder('gpu')") == [2]


@pytest.mark.usefixtures("scene")
async def test_pages_and_break_need_their_roles(guarded: Http) -> None:
    assert (await guarded.get("/signin")).headers["content-security-policy"] == POLICY
    for path in (*PAGES, "/events", "/graph.svg"):
        sent = await guarded.get(path)
        assert sent.status_code == 303, path
        assert sent.headers["location"].startswith("signin?next=")
    assert (await guarded.post("/break?name=a", data={})).status_code == 401
    await guarded.post("/signin", data={"token": TOKENS["lock"]})
    assert (await guarded.get("/")).status_code == 200
    assert (await guarded.get("/break?name=billing%3Aclose")).status_code == 403
    path, fields = form("billing:close", 1)
    assert (await guarded.post(path, data=fields)).status_code == 403
    assert "Break…" not in (await guarded.get("/lock?name=billing%3Aclose")).text


async def test_cookie_keeps_no_token_and_is_for_the_dashboard_alone(guarded: Http) -> None:
    wrong = await guarded.post("/signin", data={"token": "w" * 20})
    assert wrong.status_code == 401
    assert "set-cookie" not in wrong.headers
    right = await guarded.post("/signin?next=lock%3Fname%3Da", data={"token": TOKENS["see"]})
    assert (right.status_code, right.headers["location"]) == (303, "./lock?name=a")
    cookie = right.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKENS["see"] not in cookie
    assert (await guarded.get("/")).status_code == 200
    assert (await guarded.get("/v1/locks")).status_code == 401, "the API takes no cookie"
    until, _, code = guarded.cookies["dblock_session"].partition(".")
    for forged in (f"{int(until) + 1}.{code}", f"{until}.{code[:-1]}", "1." + code, "x", "", f"{until}.\x7f"):
        guarded.cookies.clear()
        assert (await guarded.get("/", headers={"cookie": f"dblock_session={forged}"})).status_code == 303, forged
    await guarded.post("/signin", data={"token": TOKENS["see"]})
    assert "Max-Age=0" in (await guarded.post("/signout")).headers["set-cookie"]


async def test_cookie_ends_after_twelve_hours(guarded: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    await guarded.post("/signin", data={"token": TOKENS["see"]})
    cookie = {"cookie": f"dblock_session={guarded.cookies['dblock_session']}"}
    began = time.time()
    for hours, status in ((11.9, 200), (12.1, 303)):
        monkeypatch.setattr("dblock.server.dashboard.signin.time.time", lambda later=hours: began + later * 3600)
        assert (await guarded.get("/", headers=cookie)).status_code == status


@pytest.mark.parametrize("then", ["//evil.example", "https://evil.example", "\\\\evil", "javascript:alert(1)", "..//x"])
async def test_sign_in_never_redirects_to_another_site(guarded: Http, then: str) -> None:
    response = await guarded.post("/signin?" + urlencode({"next": then}), data={"token": TOKENS["see"]})
    assert response.headers["location"] == "./"


async def test_page_of_another_site_can_neither_break_nor_sign_in(http: Http, scene: Scene) -> None:
    token = scene.call("SELECT token FROM holder('import:customers')")[0]
    path, fields = form("import:customers", token)
    for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "http://evil.example"}):
        assert (await http.post(path, data=fields, headers=headers)).status_code == 403
        assert (await http.post("/signin", data={"token": "x"}, headers=headers)).status_code == 403
    assert scene.call("SELECT count(*) FROM list_history('import:customers') WHERE event = 'forced'") == [0]


@pytest.mark.usefixtures("scene")
async def test_links_stay_under_the_prefix(dsn: str) -> None:
    async with serving(dsn, prefix="/ops/locks") as http:
        for path in PAGES:
            for sent in (path, f"/ops/locks{path}"):
                page = await read(http, sent)
                for tag, attributes in page.elements:
                    for name in ("href", "src", "action", "data-stream"):
                        target = attributes.get(name)
                        assert not target or target[0] in "?#" or target.startswith("/ops/locks/"), (tag, target)


async def test_pages_say_that_the_database_is_away() -> None:
    async with serving("postgresql://app@127.0.0.1:1/none") as http:
        for path in ("/", "/lock?name=a", "/graph", "/break?name=a"):
            page = await read(http, path, 503)
            assert "database" in page.words
            assert "Try again" in page.words
