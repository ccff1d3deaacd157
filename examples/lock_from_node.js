// Use the lock service from Node.js: no dblock client, only the driver `pg` (npm install pg).
//
// Shows a complete wait in the queue, the renewal of the lease, and the moment to stop. Any other
// language works in the same way: listen on your channel, call `acquire`, and call it again when
// you are notified, or after a second. The repeated call is also the heartbeat of your ticket.
//
//     DBLOCK_DSN=postgresql://… node examples/lock_from_node.js

const { randomUUID } = require("node:crypto");
const { setTimeout: sleep } = require("node:timers/promises");
const { Client } = require("pg");

const TTL = 10; // seconds

class Locks {
  // One for each process. Every call is a transaction of its own, as the functions expect.
  static async open(dsn) {
    const locks = new Locks();
    locks.client = randomUUID();
    locks.waiting = new Map(); // attempt → the function that wakes it
    locks.calls = new Client({ connectionString: dsn });
    locks.listener = new Client({ connectionString: dsn }); // not through a pooler in transaction mode
    await Promise.all([locks.calls.connect(), locks.listener.connect()]);
    locks.listener.on("notification", ({ payload }) => locks.waiting.get(payload)?.());
    await locks.listener.query(`LISTEN "dblock_${locks.client.replaceAll("-", "")}"`);
    return locks;
  }

  async call(sql, values) {
    return (await this.calls.query(sql, values)).rows[0];
  }

  // Wait for the lock, at most `timeout` seconds. Returns a lease, or null.
  async acquire(name, timeout) {
    const attempt = randomUUID();
    const giveUp = performance.now() + timeout * 1000;
    let hadTicket = false;
    try {
      for (;;) {
        let wake;
        const woken = new Promise((resolve) => (wake = resolve));
        this.waiting.set(attempt, wake); // before the call, so that no notification is missed
        const asked = performance.now();
        const row = await this.call(
          `SELECT granted, token::text, remaining, ticket::text FROM dblock.acquire($1,
             ttl => make_interval(secs => $2), holder => $3, attempt => $4, client => $5, had_ticket => $6)`,
          [name, TTL, `node pid ${process.pid}`, attempt, this.client, hadTicket],
        );
        if (row.granted) return new Lease(this, name, row.token, asked, row.remaining);
        hadTicket ||= row.ticket !== null;
        const left = giveUp - performance.now();
        if (left <= 0) {
          // Gives the ticket back, and the lock too if it was granted in this moment.
          await this.call("SELECT dblock.abandon($1, $2)", [name, attempt]);
          return null;
        }
        // At the latest, ask again in a second, or when the holder's lease expires.
        await Promise.race([woken, sleep(Math.min(1000, left, Math.max(row.remaining * 1000, 50)))]);
      }
    } finally {
      this.waiting.delete(attempt);
    }
  }

  async close() {
    await this.call("SELECT dblock.leave_queue($1)", [this.client]);
    await Promise.all([this.calls.end(), this.listener.end()]);
  }
}

class Lease {
  constructor(locks, name, token, asked, remaining) {
    Object.assign(this, { locks, name, token });
    this.lost = new AbortController(); // pass lost.signal to everything that must stop
    this.trust(asked, remaining);
    this.renewals = setInterval(() => this.renew().catch(() => {}), (TTL / 3) * 1000);
  }

  // Trust the lease from the moment *before* the request, less a margin, on a clock that never jumps.
  trust(asked, remaining) {
    clearTimeout(this.end);
    const left = asked + remaining * 1000 * 0.98 - performance.now();
    this.end = setTimeout(() => this.lost.abort(new Error(`lease of ${this.name} lost`)), Math.max(left, 0));
  }

  async renew() {
    const asked = performance.now();
    const row = await this.locks.call(
      "SELECT remaining FROM dblock.renew($1, $2, make_interval(secs => $3))", [this.name, this.token, TTL],
    );
    if (row) this.trust(asked, row.remaining);
    else this.lost.abort(new Error(`lease of ${this.name} lost`)); // no row: stop writing
  }

  async release() {
    clearInterval(this.renewals);
    clearTimeout(this.end);
    const sql = "SELECT dblock.release($1, $2, durable => false) AS released"; // wakes the first waiter
    return (await this.locks.call(sql, [this.name, this.token])).released;
  }
}

async function main() {
  const [one, other] = await Promise.all([1, 2].map(() => Locks.open(process.env.DBLOCK_DSN)));
  const first = await one.acquire("example:node", 5);
  console.log("a second client gives up after 0.3 s:", await other.acquire("example:node", 0.3));
  const waiting = other.acquire("example:node", 10);
  await sleep(300);
  console.log("released:", await first.release());
  const second = await waiting;
  console.log("the waiter was granted a higher token:", BigInt(second.token) > BigInt(first.token));
  await second.renew();
  console.log("lost:", second.lost.signal.aborted);
  await second.release();
  await Promise.all([one.close(), other.close()]);
}

main();
