"""A browser for the dashboard's tests, and a server in this process whose clock can run faster."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from dblock.server.app import create_app
from dblock.server.service import Service
from dblock.server.settings import Settings
from tests.support.eventually import eventually
from tests.support.proxy import Proxy
from tests.support.servers import private_server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

MODULES = ("playwright", "axe_playwright_python")

_MISSING = [
    *(["apt-get install chromium"] if CHROMIUM is None else []),
    *(f"pip install {name.replace('_', '-')}" for name in MODULES if importlib.util.find_spec(name) is None),
]

needs_browser = pytest.mark.skipif(bool(_MISSING), reason=f"needs a browser: {', and '.join(_MISSING)}")


@contextmanager
def browser() -> Iterator[Any]:
    """Start a browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


class Running:
    """A server in a thread of this process."""

    def __init__(self, settings: Settings, interval: float) -> None:
        app = create_app(settings)
        self.service: Service = app.state.service
        self.service.feed._interval = interval
        config = uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="on", proxy_headers=False)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        eventually(lambda: self._server.started or not self._thread.is_alive(), "the start of the server")
        assert self._thread.is_alive(), "the server did not start"
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}{settings.prefix}/"

    def stop(self) -> None:
        """End the server, and its streams first."""
        loop = self._server.servers[0].get_loop()
        loop.call_soon_threadsafe(self.service.stopping.set)
        self._server.should_exit = True
        self._thread.join(20)


@contextmanager
def running(dsn: str, interval: float = 1.0, **settings: Any) -> Iterator[Running]:
    """Run a server whose snapshots have this interval."""
    made = Running(Settings(dsn=dsn, **settings), interval)
    try:
        yield made
    finally:
        made.stop()


@contextmanager
def failing_database(how: str, dsn: str) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """Yield the DSN of a database that can fail, what makes it fail, and what brings it back."""
    if how == "silent":
        with Proxy(dsn) as proxy:
            yield proxy.dsn, proxy.fall_silent, proxy.flow
    else:
        with private_server({"fsync": "off"}, in_memory=True, installed=True) as server:
            yield server.url, lambda: server.stop(signal.SIGQUIT), server.start


def violations(page: Any) -> list[str]:
    """Return what axe-core finds on a page, of every impact, and then which colours it finds too close in the dark."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    page.emulate_media(color_scheme="dark")
    found += Axe().run(page, options={"runOnly": ["color-contrast"]}).response["violations"]
    page.emulate_media(color_scheme="light")
    return [f"{one['id']} ({one['impact']}): {node['html'][:120]}" for one in found for node in one["nodes"]]


WATCH_THE_BANNER = """
() => {
  const banner = document.querySelector("[data-banner]");
  const note = () => { if (!banner.hidden) window.shownAt ??= Date.now(); };
  new MutationObserver(note).observe(banner, { attributes: true });
  window.late = 0;
  let last = performance.now();
  setInterval(() => {
    const now = performance.now();
    window.late = Math.max(window.late, now - last - 20);
    last = now;
  }, 20);
}
"""
"""Notes when the banner appears, and how late this machine lets the browser be."""
