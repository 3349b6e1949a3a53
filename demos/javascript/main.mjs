// node main.mjs TOPIC: handles orders that were not paid in time, until SIGTERM or Ctrl-C.

import { setTimeout as sleep } from "node:timers/promises";

import { Consumer } from "./consumer.mjs";

async function cancelUnpaid({ id, body, attempt }) {
  const { order, takes_ms: takesMs = 0, fails = 0 } = body;
  console.log(`order ${order}: is it paid?`);
  await sleep(takesMs);
  if (attempt <= fails) {
    throw Object.assign(new Error("the shop does not answer"), { delayMs: 100 });
  }
  console.log(`order ${order}: not paid, cancelled (message ${id}, attempt ${attempt})`);
}

const consumer = new Consumer({
  url: process.env.LISA_URL,
  token: process.env.LISA_TOKEN,
  topic: process.argv[2] ?? "orders",
  concurrency: Number(process.env.CONCURRENCY ?? 4),
  graceMs: Number(process.env.GRACE_MS ?? 10_000),
  handler: cancelUnpaid,
});
for (const signal of ["SIGTERM", "SIGINT"]) process.on(signal, () => consumer.stop());

console.log("waiting for orders");
await consumer.run();
console.log("stopped");
process.exit(0);
