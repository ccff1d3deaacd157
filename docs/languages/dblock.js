// A client of dblock for Node.js in one file: copy it. It needs only the driver: npm install pg
//
//     const locks = await Locks.open(process.env.DBLOCK_DSN);
//     const lease = await locks.acquire("invoice:42", { ttl: 30, timeout: 5 });   // or null
//     try { await work(lease.token, lease.lost); } finally { await lease.release(); }
//
// It waits in the same queue as every other client, listens for its turn, and renews its leases. Pass
// `lease.lost`, an AbortSignal, to everything that must stop when the lease is lost.

const { randomUUID } = require("node:crypto");
const { setTimeout: sleep } = require("node:timers/promises");
const { Client, Pool } = require("pg");

const TRUSTED = 0.98; // of what the database says is left, because two clocks never run equally fast
const PATIENCE = { query_timeout: 5000, connectionTimeoutMillis: 5000 }; // then a call fails

class Locks {
  // One for each process. With `presence`, a grace in seconds, the locks of a process that dies go to
  // the next waiter after that grace. If the listener's connection breaks, all leases are lost then.
  static async open(dsn, { presence = null, holder = `node pid ${process.pid}` } = {}) {
    const locks = Object.assign(new Locks(), { dsn, grace: presence, holder, presence: null, closing: false });
    locks.client = randomUUID();
    locks.waiting = new Map(); // attempt → the function that wakes it
    locks.leases = new Set();
    locks.pool = new Pool({ connectionString: dsn, max: 3, ...PATIENCE });
    locks.pool.on("error", () => {}); // an idle connection broke: the next call opens another one
    await locks.listen();
    return locks;
  }

  // The one connection over which waiters are woken. It must not go through a pooler in transaction mode.
  async listen() {
    const listener = new Client({ connectionString: this.dsn, keepAlive: true, ...PATIENCE });
    listener.on("notification", ({ payload }) => this.waiting.get(payload)?.());
    const broken = () => this.listener === listener && this.relisten();
    listener.on("error", broken).on("end", broken);
    try {
      await listener.connect();
      await listener.query(`LISTEN "dblock_${this.client.replaceAll("-", "")}"`);
      const presence = this.grace === null ? null : randomUUID();
      const sql = "SELECT dblock.register_presence($1, make_interval(secs => $2))";
      if (presence !== null) await listener.query(sql, [presence, this.grace]);
      if (this.closing) throw new Error("The client was closed.");
      Object.assign(this, { listener, presence });
    } catch (error) {
      listener.end().catch(() => {});
      throw error;
    }
  }

  async relisten() {
    this.listener = null;
    if (this.presence !== null) for (const lease of this.leases) lease.lose("the presence has ended");
    this.presence = null;
    while (!this.closing && this.listener === null) {
      await sleep(500); // waiters ask once a second in the meantime
      await this.listen().catch(() => {});
    }
  }

  // Each call is a transaction of its own, as the functions expect.
  async call(sql, values) {
    return (await this.pool.query(sql, values)).rows[0];
  }

  // Wait for the lock, at most `timeout` seconds. Return a lease, or null.
  async acquire(name, { ttl = 30, timeout = Infinity } = {}) {
    const attempt = randomUUID();
    const giveUp = performance.now() + timeout * 1000;
    let hadTicket = false;
    try {
      for (;;) {
        let wake;
        const woken = new Promise((resolve) => (wake = resolve));
        this.waiting.set(attempt, wake); // before the call, so that no notification is missed
        const asked = performance.now();
        const presence = this.presence;
        const row = await this.call(
          `SELECT granted, token::text, remaining, ticket::text FROM dblock.acquire($1, ttl => make_interval(secs => $2),
             holder => $3, attempt => $4, client => $5, had_ticket => $6, presence => $7)`,
          [name, ttl, this.holder, attempt, this.client, hadTicket, presence],
        );
        if (row.granted) return new Lease(this, name, ttl, row, asked, presence);
        hadTicket ||= row.ticket !== null;
        const left = giveUp - performance.now();
        if (left <= 0) {
          // Gives the ticket back, and the lock too if it was granted at this moment.
          await this.call("SELECT dblock.abandon($1, $2)", [name, attempt]);
          return null;
        }
        // Ask again in a second at the latest: the call is also the heartbeat of the ticket.
        const timer = new AbortController();
        const pause = Math.min(1000, left, Math.max(row.remaining * 1000, 50));
        await Promise.race([woken, sleep(pause, null, timer).catch(() => {})]);
        timer.abort();
      }
    } finally {
      this.waiting.delete(attempt);
    }
  }

  async close() {
    this.closing = true;
    try {
      for (const lease of [...this.leases]) await lease.release();
      await this.call("SELECT dblock.leave_queue($1)", [this.client]);
    } finally {
      const listener = this.listener;
      this.listener = null;
      await Promise.all([this.pool.end(), listener?.end()]);
    }
  }
}

class Lease {
  constructor(locks, name, ttl, row, asked, presence) {
    Object.assign(this, { locks, name, ttl, token: Number(row.token) }); // a token is below 2^53
    this.ended = new AbortController();
    this.trustedUntil = -Infinity;
    locks.leases.add(this);
    this.renewals = setInterval(() => this.renew().catch(() => {}), (ttl / 3) * 1000);
    this.trust(asked, row.remaining);
    if (presence !== locks.presence) this.lose("the presence has ended");
  }

  get lost() {
    return this.ended.signal;
  }

  // Return whether the lease is held for certain. A process that was stopped past its lease has not run its timers.
  isHeld() {
    const late = performance.now() >= this.trustedUntil;
    if (late && this.locks.leases.has(this)) this.lose("it was not renewed in time");
    return this.locks.leases.has(this);
  }

  // Trust the lease from the moment *before* the request, on a clock that never jumps.
  trust(asked, remaining) {
    this.trustedUntil = Math.max(this.trustedUntil, asked + remaining * 1000 * TRUSTED);
    this.watch();
  }

  // Lose the lease at the end of its trust window. A timer may be up to a millisecond early.
  watch() {
    clearTimeout(this.timer);
    if (!this.isHeld()) return;
    this.timer = setTimeout(() => this.watch(), Math.ceil(this.trustedUntil - performance.now()));
  }

  lose(why) {
    this.stop();
    this.ended.abort(new Error(`The lease of ${this.name} was lost: ${why}. Stop writing.`));
  }

  stop() {
    clearInterval(this.renewals);
    clearTimeout(this.timer);
    this.locks.leases.delete(this);
  }

  async renew() {
    const asked = performance.now();
    const sql = "SELECT remaining FROM dblock.renew($1, $2, make_interval(secs => $3))";
    const row = await this.locks.call(sql, [this.name, this.token, this.ttl]);
    if (!this.locks.leases.has(this)) return; // lost or released by now
    if (row) this.trust(asked, row.remaining);
    else this.lose("another client may hold the lock");
  }

  // Free the lock and wake the next waiter. False: it was not held under this token any more.
  async release() {
    this.stop();
    const sql = "SELECT dblock.release($1, $2, durable => false) AS released";
    return (await this.locks.call(sql, [this.name, this.token])).released;
  }
}

module.exports = { Locks, Lease };
