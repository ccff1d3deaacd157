// Makes the pages live: patches rows by their keys, counts times, and tells when what is shown is old.
// Everything also works without this file, after a reload.
"use strict";
(() => {
  // Milliseconds without fresh data until the banner: fewer if the server says that the database is away.
  const STALE = 2500, AWAY = 1200;
  const body = document.body;
  const all = (selector, root = document) => root.querySelectorAll(selector);
  const one = (selector, root = document) => root.querySelector(selector);
  const now = () => performance.now();

  // Times. An element counts from the moment at which it got its seconds. What it shows is kept beside it, because
  // asking the document for a thousand texts takes longer than a frame.
  const counting = new Map();
  function spell(seconds) {
    if (seconds < 1) return "< 1 s";
    const whole = Math.floor(seconds), minutes = Math.floor(whole / 60) % 60;
    const hours = Math.floor(whole / 3600) % 24, days = Math.floor(whole / 86400);
    const two = (number) => String(number).padStart(2, "0");
    if (days) return `${days} d ${hours} h`;
    if (hours) return `${hours} h ${two(minutes)} min`;
    return minutes ? `${minutes} min ${two(whole % 60)} s` : `${whole} s`;
  }
  function anchor(element, seconds, at = now()) {
    let times = counting.get(element);
    if (!times) {
      times = { down: element.hasAttribute("data-left"), zero: 0, text: null, look: element.className };
      counting.set(element, times);
    }
    times.zero = times.down ? at + seconds * 1000 : at - seconds * 1000;
    show(element, times, at);
  }
  function show(element, times, at) {
    const seconds = (times.down ? times.zero - at : at - times.zero) / 1000;
    const text = times.down && seconds <= 0 ? "over" : spell(Math.max(seconds, 0));
    if (times.text !== text) {
      times.text = text;
      if (element.firstChild) element.firstChild.data = text; else element.textContent = text;
    }
    const look = !times.down || seconds >= 5 ? "" : seconds <= 0 ? "over" : "soon";
    if (times.look !== look) element.className = times.look = look;
  }
  function anchorAll(root) {
    for (const element of all("time", root)) {
      const given = element.dataset.left ?? element.dataset.since;
      if (given) anchor(element, Number(given)); else counting.delete(element);
    }
  }
  setInterval(() => {
    const at = now();
    for (const [element, times] of counting) {
      if (element.isConnected) show(element, times, at); else counting.delete(element);
    }
  }, 1000);

  // Patching: the nodes stay, so that focus, selection, scroll position and open details stay.
  const keyOf = (node) => (node.nodeType === 1 ? node.dataset?.key : undefined);
  function morph(from, to) {
    if (from.isEqualNode(to)) return;
    for (const { name, value } of to.attributes) {
      if (from.getAttribute(name) !== value) from.setAttribute(name, value);
    }
    if (from.attributes.length > to.attributes.length) for (const { name } of [...from.attributes]) {
      const kept = name === "open" || name === "hidden" || (name === "class" && from.tagName === "TIME");
      if (!to.hasAttribute(name) && !kept) from.removeAttribute(name);
    }
    if (from.tagName === "TIME") counting.delete(from); // it gets its seconds right after
    else if (from.tagName !== "TEXTAREA") morphChildren(from, to);
  }
  function morphChildren(from, to) {
    const keyed = new Map();
    for (const child of from.children) if (keyOf(child)) keyed.set(keyOf(child), child);
    let place = from.firstChild;
    for (const wanted of [...to.childNodes]) {
      const key = keyOf(wanted);
      let found = key ? keyed.get(key) : place;
      if (found && !key && (found.nodeType !== wanted.nodeType || found.nodeName !== wanted.nodeName || keyOf(found))) {
        found = null;
      }
      if (!found) {
        from.insertBefore(document.importNode(wanted, true), place);
        continue;
      }
      if (found !== place) from.insertBefore(found, place); else place = place.nextSibling;
      if (found.nodeType === 1) morph(found, wanted);
      else if (found.data !== wanted.data) found.data = wanted.data;
    }
    while (place) {
      const next = place.nextSibling;
      place.remove();
      place = next;
    }
  }

  // The table: what a tick says about its rows.
  const rows = new Map(), cells = new WeakMap();
  const holder = document.createElement("template");
  async function patchTable(tick) {
    const table = one("[data-rows]");
    if (!rows.size) for (const row of table.children) rows.set(row.dataset.key, row);
    const changed = Object.values(tick.rows ?? {}), slice = startSlice(tick);
    for (let first = 0; first < changed.length; first += 20) {
      patchRows(changed.slice(first, first + 20).join(""));
      await slice.spent();
    }
    patchPlaces(table, tick);
    await slice.spent();
    patchTimes(tick);
    slice.end();
    body.dataset.ticks = Number(body.dataset.ticks ?? 0) + 1;
  }
  // Many changes are spread over several frames, so that the page answers keys in between.
  let measures = 0;
  function startSlice(tick) {
    const detail = { rows: Object.keys(tick.rows ?? {}).length, times: Object.keys(tick.times ?? {}).length };
    let began = now();
    const end = (last = true) => {
      // The browser keeps every measure until it is told to drop them.
      if (++measures % 100 === 0) performance.clearMeasures("dblock-tick");
      performance.measure("dblock-tick", { start: began, end: now(), detail: { ...detail, last } });
    };
    const spent = async () => {
      if (now() - began < 5) return;
      end(false);
      await new Promise(requestAnimationFrame);
      began = now();
    };
    return { end, spent };
  }
  function patchRows(html) {
    holder.innerHTML = html;
    for (const wanted of [...holder.content.children]) {
      const key = wanted.dataset.key, row = rows.get(key);
      cells.delete(row);
      if (row) morph(row, wanted);
      else {
        const made = document.importNode(wanted, true);
        made.classList.add("fresh");
        rows.set(key, made);
      }
    }
  }
  function patchPlaces(table, tick) {
    const gone = tick.full ? [...rows.keys()].filter((key) => !Object.hasOwn(tick.times ?? {}, key)) : tick.gone ?? [];
    for (const key of gone) {
      const row = rows.get(key);
      // A row with the focus hands it to its neighbour, so that the keyboard stays where it was.
      if (row?.contains(document.activeElement)) one("a", row.nextElementSibling ?? row.previousElementSibling ?? body)?.focus();
      row?.remove();
      rows.delete(key);
    }
    if (tick.order) {
      let place = table.firstElementChild;
      for (const key of tick.order) {
        const row = rows.get(key);
        if (row === place) place = place.nextElementSibling;
        else keepFocus(row, () => table.insertBefore(row, place));
      }
      one("[data-empty]").hidden = tick.order.length > 0;
    }
  }
  function patchTimes(tick) {
    const at = now();
    for (const [key, times] of Object.entries(tick.times ?? {})) {
      const row = rows.get(key);
      if (!cells.has(row)) cells.set(row, [...all("time", row)].map((cell) => [cell, Number(cell.dataset.at)]));
      for (const [cell, index] of cells.get(row)) if (times[index] !== null) anchor(cell, times[index], at);
    }
    for (const [name, value] of Object.entries(tick.figures ?? {})) {
      const figure = one(`[data-figure="${name}"]`);
      if (!figure) continue;
      if (name === "oldest") {
        const time = one("time", figure);
        if (value === null) { counting.delete(time); time.textContent = "–"; } else anchor(time, value);
      } else if (figure.textContent !== String(value)) figure.textContent = value;
      if (name === "stuck" || name === "gone") figure.parentNode.classList.toggle("alarm", value > 0);
    }
  }
  function keepFocus(row, move) {
    const focused = row.contains(document.activeElement) ? document.activeElement : null;
    move();
    focused?.focus({ preventScroll: true });
  }

  // Other pages are read again when the server says that they changed.
  let stamp = body.dataset.stamp, reading = false;
  async function readAgain(wanted) {
    if (reading || wanted === stamp) return;
    reading = true;
    try {
      const reply = await fetch(location.href, { headers: { Accept: "text/html" } });
      if (reply.redirected && new URL(reply.url).pathname.endsWith("/signin")) location.reload();
      if (!reply.ok && reply.status !== 404) return;
      const page = new DOMParser().parseFromString(await reply.text(), "text/html");
      morph(one("main"), one("main", page));
      anchorAll(one("main"));
      begin();
      stamp = page.body.dataset.stamp;
    } catch { /* the banner tells */ } finally { reading = false; }
  }

  // The stream, and the age of what is shown.
  let source = null, last = "", freshAt = now(), away = false, patching = Promise.resolve();
  const banner = one("[data-banner]"), live = one("[data-live]");
  function open() {
    if (!body.dataset.stream || source) return;
    const address = body.dataset.stream + (last ? `&last=${encodeURIComponent(last)}` : "");
    source = new EventSource(address);
    source.addEventListener("tick", (event) => {
      last = event.lastEventId;
      away = false;
      const tick = JSON.parse(event.data), at = now();
      // The rows are fresh once they are patched: if that fails, the banner tells how old they are.
      const fresh = () => { freshAt = at; judge(); };
      if (tick.stamp === undefined) patching = patching.then(() => patchTable(tick)).then(fresh);
      else { fresh(); readAgain(tick.stamp); }
    });
    source.addEventListener("away", (event) => {
      away = true;
      const age = JSON.parse(event.data).age;
      if (age >= 0) freshAt = now() - age * 1000;
      judge();
    });
    source.onerror = () => {
      if (source?.readyState !== EventSource.CLOSED) return;
      close();
      setTimeout(() => { if (!document.hidden) open(); }, 1000 + Math.random() * 1000);
    };
  }
  function close() {
    source?.close();
    source = null;
  }
  function judge() {
    if (!live) return;
    const age = now() - freshAt, stale = age > (away ? AWAY : STALE);
    live.classList.toggle("on", source !== null && !stale);
    one("[data-live-text]").textContent = stale ? "not live" : "live";
    const who = away ? "The database does not reply." : "The server does not reply.";
    const text = stale ? `${who} What you see is ${spell(age / 1000)} old.` : "";
    if (banner.textContent !== text) banner.textContent = text;
    banner.hidden = !stale;
  }
  // A tab in the background costs nothing. When it is shown again, it catches up in one request.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) close();
    else { freshAt = Math.max(freshAt, now() - STALE + 1500); open(); }
  });
  addEventListener("pagehide", close);
  addEventListener("pageshow", (event) => { if (event.persisted) open(); });

  // Keys.
  let leader = 0;
  function move(step) {
    const links = [...all("[data-rows] th a")];
    const at = links.findIndex((link) => link.closest("tr").contains(document.activeElement));
    links[at < 0 ? (step > 0 ? 0 : links.length - 1) : Math.min(Math.max(at + step, 0), links.length - 1)]?.focus();
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.closest?.("input, textarea, select, dialog");
    if (event.key === "Escape" && event.target.matches?.("input[type=search]")) event.target.blur();
    if (typing) return;
    const inRows = event.target.closest?.("[data-rows]");
    const places = { l: ".", w: "graph", s: "schedules", x: "losses" };
    if (leader && now() - leader < 1500 && places[event.key]) {
      const links = [...all(".top nav a")];
      location.href = links[Object.keys(places).indexOf(event.key)].href;
    } else if (event.key === "j" || (inRows && event.key === "ArrowDown")) move(1);
    else if (event.key === "k" || (inRows && event.key === "ArrowUp")) move(-1);
    else if (event.key === "/") one("#q")?.focus();
    else if (event.key === "?") one("#help").showModal();
    else if (event.key === "g") { leader = now(); return; } else return;
    leader = 0;
    event.preventDefault();
  });

  function begin() {
    for (const button of all("[data-copy]")) {
      button.hidden = false;
      button.onclick = async () => {
        await navigator.clipboard?.writeText(button.dataset.copy + location.href.split("&broken")[0]);
        button.textContent = "Copied";
      };
    }
    for (const hint of all(".nojs")) hint.hidden = true;
  }
  const help = one("[data-help]");
  if (help) { help.hidden = false; help.onclick = () => one("#help").showModal(); }
  anchorAll(document);
  begin();
  open();
  setInterval(judge, 250);
})();
