"""Django: management commands and views under a lock, in programs of a real project."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import dblock
from tests.dblock.integrations.django_cases import Start, start
from tests.support.django_project import Project
from tests.support.eventually import eventually
from tests.support.machine import before_long

pytestmark = [pytest.mark.second_stage]

__all__ = ["start"]

NIGHTLY = """
import time
from django.core.management.base import BaseCommand
from dblock.integrations.django.locks import LockedCommand

class Command(LockedCommand, BaseCommand):
    lock = "nightly:{tenant}"
    lock_ttl = 3

    def add_arguments(self, parser):
        parser.add_argument("--tenant", default="a")
        parser.add_argument("--busy", default="raise")
        parser.add_argument("--seconds", type=float, default=0)
        parser.add_argument("--fail", action="store_true")

    def execute(self, *args, **options):
        self.on_busy = options["busy"]
        return super().execute(*args, **options)

    def handle(self, *args, **options):
        self.stdout.write(f"runs under token {self.lease.token}")
        self.stdout.flush()
        if options["fail"]:
            raise ZeroDivisionError
        ends = time.monotonic() + options["seconds"]
        while time.monotonic() < ends:
            time.sleep(0.01)
"""
TWICE = """
from django.core.management import call_command
from django.core.management.base import BaseCommand

class Command(BaseCommand):
    def handle(self, *args, **options):
        call_command("nightly")
        try:
            call_command("nightly", fail=True)
        except ZeroDivisionError:
            self.stdout.write("failed")
        call_command("nightly")
"""
ALIASES = """
from django.core.management.base import BaseCommand
from django.db import connections
from django.http import HttpResponse
from django.test import RequestFactory, override_settings
from dblock.integrations.django.locks import client, locked

def here(request):
    return HttpResponse("here")

class Command(BaseCommand):
    def handle(self, *args, **options):
        connections.databases["other"] = {**connections.databases["default"], "NAME": "postgres"}
        there = locked("a", using="other")(here)
        self.stdout.write(str(there(RequestFactory().post("/")).status_code))  # no schema is installed there
        with override_settings(DBLOCK_LOCKS={"using": "other"}):
            self.stdout.write(str(client() is client("other")))
        with override_settings(DBLOCK_LOCKS={"holder": "me"}), client().lock("a"):
            self.stdout.write(client().lock("a").holder().holder)
"""
VIEWS = """
import dblock
from django.core.management.base import BaseCommand
from django.db import connection, transaction
from django.http import HttpResponse
from django.test import RequestFactory
from django.views import View
from dblock.integrations.django.locks import client, locked

@locked("item:{item}", ttl=3)
def work(request, item):
    lease = dblock.current_lease()
    with transaction.atomic():
        lease.assert_held(connection)
    if item == "lost":
        with connection.cursor() as cursor:
            cursor.execute("SELECT dblock.force_release(%s, %s, now => true)", [lease.name, lease.token])
        lease.lost.wait(30)
    return HttpResponse(lease.name)

class Item(View):
    @locked("item:{item}")
    def post(self, request, item):
        return HttpResponse(f"method {dblock.current_lease().name}")

class Command(BaseCommand):
    def handle(self, *args, **options):
        request = RequestFactory().post("/")
        def show(reply):
            self.stdout.write(f"{reply.status_code} {reply.headers.get('Retry-After')} {reply.content.decode()[:40]}")
        show(work(request, item="7"))
        show(Item.as_view()(request, item="7"))
        with client().lock("item:7"):
            show(work(request, item="7"))
        show(work(request, item="7"))
        show(work(request, item="lost"))
        for wrong in ("item:{itme}", "item:{"):
            try:
                locked(wrong)(work)
            except dblock.InvalidArgument as error:
                self.stdout.write("refused")
"""
ASYNC_VIEWS = """
import asyncio
import dblock
from asgiref.sync import sync_to_async
from django.core.management.base import BaseCommand
from django.db import connection, transaction
from django.http import HttpResponse
from django.test import AsyncClient, AsyncRequestFactory, Client, override_settings
from django.urls import path
from django.views import View
from dblock.integrations.django.locks import client, locked

began = None
cancelled = []

def prove(lease):
    with transaction.atomic():
        lease.assert_held(connection)

def lose(lease):
    with connection.cursor() as cursor:
        cursor.execute("SELECT dblock.force_release(%s, %s, now => true)", [lease.name, lease.token])

@locked("item:{item}", ttl=3)
async def work(request, item):
    lease = dblock.current_lease()
    dblock.assert_locked(lease.name)
    await sync_to_async(prove)(lease)
    if item == "lost":
        await sync_to_async(lose)(lease)
    if item != "7":
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(item)
    return HttpResponse(lease.name)

@locked("item:{item}", timeout=20)
async def wait(request, item):
    await asyncio.sleep(0.01)
    return HttpResponse("waited")

@locked("item:{item}")
async def unnoticed(request, item):
    lease = dblock.current_lease()
    await sync_to_async(lose)(lease)
    return HttpResponse("done")

@locked("item:{item}")
async def fail(request, item):
    raise ZeroDivisionError

class Item(View):
    @locked("item:{item}")
    async def post(self, request, item):
        return HttpResponse(f"method {dblock.current_lease().name}")

urlpatterns = [
    path("hold/<item>", work), path("wait/<item>", wait), path("class/<item>", Item.as_view()),
    path("unnoticed/<item>", unnoticed), path("fail/<item>", fail),
]

def is_free(name):
    return client().lock(name).acquire(timeout=10).release()

class Command(BaseCommand):
    def show(self, reply):
        self.stdout.write(f"{reply.status_code} {reply.headers.get('Retry-After')} {reply.content.decode()[:40]}")

    async def asgi(self):
        global began
        began = asyncio.Event()
        post = AsyncClient(raise_request_exception=False).post
        self.show(await post("/hold/7"))
        self.show(await post("/class/7"))
        with client().lock("item:7"):
            self.show(await post("/hold/7"))
        self.show(await post("/hold/7"))
        self.show(await asyncio.wait_for(post("/hold/lost"), 30))
        self.stdout.write(str(cancelled))
        self.show(await post("/unnoticed/1"))
        self.stdout.write(f"{(await post('/fail/2')).status_code} {is_free('item:2')}")
        waited = await asyncio.gather(*(post("/wait/3") for _ in range(40)))
        self.stdout.write(str({reply.status_code for reply in waited}))
        began.clear()
        request = asyncio.create_task(work(AsyncRequestFactory().post("/"), item="4"))
        await began.wait()
        request.cancel()
        try:
            await request
        except asyncio.CancelledError:
            self.stdout.write(f"cancelled {is_free('item:4')}")
        with client().lock("item:5"):
            request = asyncio.create_task(wait(AsyncRequestFactory().post("/"), item="5"))
            while not await asyncio.to_thread(client().lock("item:5").queue):
                await asyncio.sleep(0.01)
            request.cancel()
            try:
                await request
            except asyncio.CancelledError:
                pass
        self.stdout.write(f"cancelled while it waited {is_free('item:5')}")

    def handle(self, *args, **options):
        with override_settings(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"]):
            asyncio.run(self.asgi())
            for _ in range(2):
                self.show(Client().post("/hold/7"))
        for wrong, more in (("item:{itme}", {}), ("item", {"reentrant": True})):
            try:
                locked(wrong, **more)(work)
            except dblock.InvalidArgument as error:
                self.stdout.write("refused")
"""


@pytest.fixture
def project(tmp_path: Path, dsn: str) -> Project:
    """A project with two commands, on a database with the schema installed."""
    made = Project(tmp_path / "project", dsn)
    commands = made.folder / "shop/management/commands"
    commands.mkdir(parents=True)
    for folder in (commands.parent, commands):
        (folder / "__init__.py").touch()
    (commands / "nightly.py").write_text(NIGHTLY)
    (commands / "nightly_twice.py").write_text(TWICE)
    (commands / "lock_in_aliases.py").write_text(ALIASES)
    (commands / "call_views.py").write_text(VIEWS)
    (commands / "call_async_views.py").write_text(ASYNC_VIEWS)
    return made


@pytest.fixture
def client(dsn: str) -> Iterator[dblock.Client]:
    with dblock.Client(dsn) as client:
        yield client


def test_busy_command_exits_with_75_or_is_skipped(project: Project, client: dblock.Client) -> None:
    with client.lock("nightly:a"):
        assert "was not acquired" in project.run("nightly", code=75)
        assert "Skipped" in project.run("nightly", "--busy", "skip")
        assert "runs under token" in project.run("nightly", "--tenant", "b"), "another tenant has a lock of its own"
    assert "runs under token" in project.run("nightly")


def test_waiting_command_runs_after_the_holder(
    project: Project, client: dblock.Client, owner: psycopg.Connection, start: Start
) -> None:
    with client.lock("nightly:a") as lease:
        waiting = start(project, "nightly", "--busy", "wait")
        eventually(lambda: owner.execute("SELECT FROM list_waiters('nightly:a')").fetchall() != [])
    assert waiting.wait() == 0
    token = int(waiting.said.rpartition(" ")[2])
    assert token > lease.token


def test_command_whose_lease_is_lost_is_interrupted(project: Project, owner: psycopg.Connection, start: Start) -> None:
    running = start(project, "nightly", "--seconds", "60")
    eventually(lambda: "runs under token" in running.said)
    owner.execute("SELECT force_release('nightly:a', token) FROM holder('nightly:a')")
    with before_long(5):
        assert running.wait() == 76


def test_lock_of_a_killed_command_does_not_stick(project: Project, client: dblock.Client, start: Start) -> None:
    running = start(project, "nightly", "--seconds", "60")
    eventually(lambda: "runs under token" in running.said)
    running.signal(signal.SIGKILL)
    with before_long(2):
        client.lock("nightly:a").acquire(timeout=30).release()


def test_command_frees_its_lock_when_it_has_ended_or_failed(project: Project) -> None:
    said = project.run("nightly_twice").splitlines()
    assert [line.split()[0] for line in said] == ["runs", "runs", "failed", "runs"]


def test_locks_are_in_the_database_of_the_alias(project: Project) -> None:
    assert project.run("lock_in_aliases").splitlines() == ["503", "True", "me"]


def test_command_with_a_wrong_placeholder_does_not_run(project: Project) -> None:
    path = project.folder / "shop/management/commands/nightly.py"
    path.write_text(NIGHTLY.replace("{tenant}", "{tennant}"))
    said = project.run("nightly", code=1)
    assert "'nightly:{tennant}' cannot be filled" in said
    assert "runs under" not in said


def test_views_run_under_their_locks_and_refuse_while_they_are_busy(project: Project) -> None:
    lines = project.run("call_views").splitlines()
    assert lines[:2] == ["200 None item:7", "200 None method item:7"]
    assert lines[2].startswith("423 1 ")
    assert lines[3] == "200 None item:7"
    assert lines[4].startswith("503 1 ")
    assert lines[5:] == ["refused", "refused"]


def test_asynchronous_views_run_under_their_locks_and_are_cancelled_by_a_loss(project: Project) -> None:
    lines = project.run("call_async_views").splitlines()
    assert lines[:2] == ["200 None item:7", "200 None method item:7"]
    assert lines[2].startswith("423 1 ")
    assert lines[3] == "200 None item:7"
    assert [line[:6] for line in lines[4:7]] == ["503 1 ", "['lost", "503 1 "]
    assert lines[7:11] == ["500 True", "{200}", "cancelled True", "cancelled while it waited True"]
    assert lines[11:] == ["200 None item:7", "200 None item:7", "refused", "refused"]


def test_dblock_commands_install_the_schema_and_list_locks(tmp_path: Path, bare_dsn: str) -> None:
    project = Project(tmp_path / "project", bare_dsn)
    assert "The schema dblock is installed" in project.run("dblock_install")
    with dblock.Client(bare_dsn, holder="me") as client, client.lock("nightly:a") as lease:
        assert f"nightly:a  me  token {lease.token}" in project.run("dblock_locks")
        assert project.run("dblock_locks", "other:%") == ""
