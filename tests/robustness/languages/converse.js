// Use the client of docs/languages as each line of standard input says: one word, then its arguments, between tabs.
const readline = require("node:readline");
const { Locks } = require("../../../docs/languages/dblock.js");

async function main() {
  const locks = await Locks.open(process.env.DBLOCK_DSN);
  let lease = null;
  const verbs = {
    async acquire(name, ttl, timeout) {
      const mine = await locks.acquire(name, { ttl: Number(ttl), timeout: Number(timeout) });
      if (mine === null) return "busy";
      mine.lost.addEventListener("abort", () => console.log("lost"));
      lease = mine;
      return `granted ${mine.token}`;
    },
    held: async () => lease.isHeld(),
    release: async () => lease.release(),
  };
  console.log("ready");
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [verb, ...values] = line.split("\t");
    console.log(await verbs[verb](...values).catch((error) => `failed ${error.message}`));
  }
  await locks.close();
}

main();
