// Use the lock service from Node.js, with the client in docs/languages/dblock.js: no Python, only the
// driver `pg` (npm install pg).
//
//     DBLOCK_DSN=postgresql://… node examples/lock_from_node.js

const { setTimeout: sleep } = require("node:timers/promises");
const { Locks } = require("../docs/languages/dblock.js");

async function main() {
  const [one, other] = await Promise.all([1, 2].map(() => Locks.open(process.env.DBLOCK_DSN)));
  const first = await one.acquire("example:node", { ttl: 10, timeout: 5 });
  console.log("a second client gives up after 0.3 s:", await other.acquire("example:node", { timeout: 0.3 }));
  const waiting = other.acquire("example:node", { ttl: 10, timeout: 10 });
  await sleep(300);
  console.log("released:", await first.release());
  const second = await waiting;
  console.log("the waiter was granted a higher token:", second.token > first.token);
  await second.renew();
  console.log("lost:", second.lost.aborted);
  await second.release();
  await Promise.all([one.close(), other.close()]);
}

main();
