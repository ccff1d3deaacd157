"""A Django project in one file: a view and a management command under a lock, side by side with select_for_update.

`pay` changes a row in one transaction, so select_for_update is enough. `close` works for longer than a transaction
should last, so it holds a lock, and proves the lease in the transaction at its end.

    python examples/django_locks.py                  # on $DBLOCK_DSN, or on the embedded Postgres

Needs django.
"""

from __future__ import annotations

import os
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import django
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

import dblock
from dblock import embedded

DSN: dict[str, Any] = conninfo_to_dict(os.environ.get("DBLOCK_DSN") or embedded.start().url)

settings.configure(
    ROOT_URLCONF=__name__,
    ALLOWED_HOSTS=["*"],
    INSTALLED_APPS=["dblock.integrations.django"],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            **{key.upper(): DSN[key] for key in ("user", "password", "host", "port") if key in DSN},
            "NAME": DSN["dbname"],
        }
    },
)
django.setup()

from django.core.management import BaseCommand, CommandError, call_command  # noqa: E402
from django.core.wsgi import get_wsgi_application  # noqa: E402
from django.db import connection, models, transaction  # noqa: E402
from django.http import HttpRequest, HttpResponse  # noqa: E402
from django.urls import path  # noqa: E402

from dblock.integrations.django.locks import LockedCommand, client, locked  # noqa: E402


class Invoice(models.Model):  # type: ignore[misc]
    paid = models.IntegerField(default=0)
    closed_by = models.BigIntegerField(null=True)

    class Meta:
        app_label = "invoices"
        db_table = "example_invoices"


def pay(request: HttpRequest, invoice_id: int) -> HttpResponse:
    with transaction.atomic():
        invoice = Invoice.objects.select_for_update().get(pk=invoice_id)
        invoice.paid += 10
        invoice.save()
    return HttpResponse(invoice.paid)


@locked("invoice:{invoice_id}")
def close(request: HttpRequest, invoice_id: int) -> HttpResponse:
    lease = dblock.current_lease()
    time.sleep(0.5)  # asks another service; no transaction is open in the meantime
    with transaction.atomic():
        lease.assert_held(connection)  # a holder that was stopped past its lease does not commit
        invoice = Invoice.objects.select_for_update().get(pk=invoice_id)
        invoice.closed_by = lease.token
        invoice.save()
    return HttpResponse(f"closed at {invoice.paid}")


class CloseAll(LockedCommand, BaseCommand):  # type: ignore[misc]
    """In a project, this is the class Command in management/commands/close_all.py."""

    lock = "close-all"

    def handle(self, *args: Any, **options: Any) -> None:
        self.stdout.write("the command has closed all invoices")


urlpatterns = [path("<int:invoice_id>/pay", pay), path("<int:invoice_id>/close", close)]


class Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class Quiet(WSGIRequestHandler):
    def log_message(self, *args: Any) -> None: ...


def post(address: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(address, timeout=30) as reply:  # noqa: S310
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


def main() -> None:
    call_command("dblock_install")
    with connection.schema_editor() as editor:
        editor.create_model(Invoice)
    Invoice.objects.create(pk=42)
    server = make_server("127.0.0.1", 0, get_wsgi_application(), server_class=Server, handler_class=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/42"
    with ThreadPoolExecutor(3) as requests:
        closing = [requests.submit(post, f"{address}/close") for _ in range(2)]
        time.sleep(0.2)
        print("pay while the invoice is being closed:", *requests.submit(post, f"{address}/pay").result())
        print("close it twice at once:", *sorted(one.result() for one in closing))
    call_command(CloseAll())
    with client().lock("close-all"):
        try:
            call_command(CloseAll())
        except CommandError as error:
            print("while another process runs the command, exit code", error.returncode)
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    main()
