"""A browser for the dashboard's tests, and a server in this process whose clock can run faster."""

from __future__ import annotations

import importlib.util
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from dblock.server.app import create_app
from dblock.server.service import Service
from dblock.server.settings import Settings

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="needs a browser: apt-get install chromium, and pip install playwright",
)


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
        while not self._server.started:
            time.sleep(0.01)
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


FINDINGS = """
() => {
  const found = [];
  const report = (what, element) => found.push(what + ": " + element.outerHTML.slice(0, 120));
  const name = (element) => (element.getAttribute("aria-label") || element.labels?.[0]?.textContent ||
    document.getElementById(element.getAttribute("aria-labelledby"))?.textContent || element.textContent ||
    element.title || "").trim();
  const shown = (element) => element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
  if (!document.documentElement.lang) found.push("the page has no language");
  if (!document.title) found.push("the page has no title");
  for (const landmark of ["main", "header"]) {
    if (document.querySelectorAll("body > " + landmark).length !== 1) found.push("not one " + landmark);
  }
  if (document.querySelectorAll("h1").length !== 1) found.push("not one h1");
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  if (new Set(ids).size !== ids.length) found.push("an id occurs twice");
  for (const element of document.querySelectorAll("a[href], button, summary")) {
    if (!name(element)) report("no name", element);
  }
  for (const element of document.querySelectorAll("input:not([type=hidden]), textarea, select")) {
    if (!element.labels?.length && !element.getAttribute("aria-label")) report("no label", element);
  }
  for (const element of document.querySelectorAll("nav")) {
    if (!element.getAttribute("aria-label")) report("no name", element);
  }
  for (const element of document.querySelectorAll("svg[role=img]")) {
    if (!element.getAttribute("aria-label") && !element.querySelector("title")) report("no name", element);
  }
  for (const element of document.querySelectorAll("[role=img] a, button a, a a")) report("a link in a leaf", element);
  for (const table of document.querySelectorAll("table")) {
    if (!table.querySelector("thead th[scope=col]")) report("no headings", table);
  }
  let level = 0;
  for (const heading of document.querySelectorAll("main h1, main h2, main h3")) {
    const next = Number(heading.tagName[1]);
    if (next > level + 1) report("a heading skips a level", heading);
    level = next;
  }
  const numbers = (colour) => {
    const all = colour.match(/[0-9.]+/g).map(Number);
    return [...all.slice(0, 3), all[3] ?? 1];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const light = (colour) => colour.slice(0, 3).map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, i) => sum + one * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(numbers(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const hidden = element.closest("svg, script, dialog:not([open])") || !shown(element);
    if (hidden || !walker.currentNode.data.trim()) continue;
    const below = ground(element), text = over(numbers(getComputedStyle(element).color), below);
    const [brighter, darker] = [light(text), light(below)].sort((a, b) => b - a);
    const ratio = (brighter + 0.05) / (darker + 0.05);
    if (ratio < 4.5) report(`contrast ${ratio.toFixed(2)} of ${walker.currentNode.data.trim().slice(0, 30)}`, element);
  }
  return found;
}
"""
"""Finds what a person with a screen reader, a keyboard or weak eyes would stumble over."""
