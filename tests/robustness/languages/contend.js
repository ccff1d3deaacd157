// Contend for a lock with the client of docs/languages, and record a history: contend.js HISTORY LOCK STOP TTL
const fs = require("node:fs");
const { setTimeout: sleep } = require("node:timers/promises");
const { Locks } = require("../../../docs/languages/dblock.js");

const [path, lock, stop] = process.argv.slice(2);
const ttl = Number(process.argv[5]);
const file = fs.openSync(path, "a");
const now = () => Number(process.hrtime.bigint()) / 1e9; // the machine's monotonic clock, as Python's
let numbers = 0;

function begin(kind, details, at = now()) {
  fs.writeSync(file, JSON.stringify({ id: numbers, at, kind, key: lock, details }) + "\n");
  return numbers++;
}

function end(id, outcome, details = {}) {
  fs.writeSync(file, JSON.stringify({ id, at: now(), outcome, details }) + "\n");
}

function record(kind, details, at) {
  end(begin(kind, details, at), "ok");
}

async function turn(locks, holdFor, timeout) {
  const acquiring = begin("acquire", { ttl, timeout, keep_alive: true });
  const lease = await locks.acquire(lock, { ttl, timeout });
  if (lease === null) return end(acquiring, "failed");
  end(acquiring, "ok", { token: lease.token });
  const ends = now() + holdFor;
  for (;;) {
    const before = now();
    if (!lease.isHeld()) {
      record("loss", { token: lease.token, reason: String(lease.lost.reason) });
      break;
    }
    record("believe", { token: lease.token }, before);
    if (now() >= ends) break;
    await sleep(Math.min(5, (ends - now()) * 1000));
  }
  const releasing = begin("release", { token: lease.token });
  end(releasing, "ok", { freed: await lease.release() });
}

async function main() {
  const locks = await Locks.open(process.env.DBLOCK_DSN);
  console.log("ready");
  await new Promise((resolve) => process.stdin.once("data", resolve));
  process.stdin.destroy();
  for (let number = 1; !fs.existsSync(stop); number++) {
    // Every tenth wait may end before its turn, and one of forty holds is longer than the lease lasts without a renewal.
    await turn(locks, number % 40 === 10 ? ttl * 1.3 : Math.random() * 0.01, number % 10 === 5 ? 0.02 : 30);
  }
  await locks.close();
}

main();
