// BullMQ on Node: a sorted set of delayed jobs, promoted by the script that fetches.
// The protocol is README.md's in the folder above; this is its Node edition, with a ledger of its own.

import { spawn } from "node:child_process";
import { readFileSync, openSync, writeSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

const environment = process.env.BENCH_ENVIRONMENT ?? fileURLToPath(new URL("../../../build/bench/bullmq_node", import.meta.url));
const require = createRequire(join(environment, "package.json"));
const { Queue, Worker } = require("bullmq");

const BODY_BYTES = 100;
const BATCH = 500;
const FLUSH_MS = 20;
const PROCESSES = 1;
const CONCURRENCY = 100;
const LIMIT = Number(process.env.BENCH_LIMIT ?? 0);

const redis = new URL(process.env.BENCH_REDIS_URL ?? "redis://127.0.0.1:6379/0");
const connection = {
  host: redis.hostname,
  port: Number(redis.port || 6379),
  db: Number(redis.pathname.slice(1) || 0),
};

function jobs(options) {
  const count = Number(options.count);
  const step = options.rate === undefined ? 0 : 1000 / Number(options.rate);
  const first = Number(options["due-ms"] ?? options["start-ms"]);
  return Array.from({ length: count }, (_, i) => {
    const due = first + Math.floor(i * step);
    return { due, body: String(due).padStart(13, "0").padEnd(BODY_BYTES, "x") };
  });
}

// A delay counts from the job's own timestamp, so the two add up to the instant exactly.
function delayed({ due }) {
  const timestamp = Date.now();
  return { timestamp, delay: Math.max(due - timestamp, 0), removeOnComplete: true };
}

async function timed(send) {
  const queue = new Queue("bench", { connection });
  await queue.waitUntilReady();
  const started = process.hrtime.bigint();
  await send(queue);
  const seconds = Number(process.hrtime.bigint() - started) / 1e9;
  await queue.close();
  return seconds;
}

// addBulk, the documentation's way for many: one pipeline a call.
function sendBulk(all) {
  return timed(async (queue) => {
    for (let i = 0; i < all.length; i += BATCH) {
      await queue.addBulk(
        all.slice(i, i + BATCH).map((job) => ({ name: "handle", data: job.body, opts: delayed(job) })),
      );
    }
  });
}

function sendEach(all, tasks) {
  return timed(async (queue) => {
    const waiting = all.values();
    await Promise.all(
      Array.from({ length: tasks }, async () => {
        for (const job of waiting) await queue.add("handle", job.body, delayed(job));
      }),
    );
  });
}

function ledger() {
  const file = openSync(join(process.env.BENCH_LEDGER, `${process.pid}.ledger`), "a");
  let buffer = Buffer.allocUnsafe(1 << 20);
  let used = 0;
  const flush = () => {
    if (used > 0) writeSync(file, buffer, 0, used);
    used = 0;
  };
  setInterval(flush, FLUSH_MS);
  process.on("exit", flush);
  return (body) => {
    if (used + 16 > buffer.length) flush();
    // Date.now() counts whole milliseconds; performance gives the fraction on the same clock.
    const handled = BigInt(Math.round((performance.timeOrigin + performance.now()) * 1000));
    buffer.writeBigInt64LE(BigInt(body.slice(0, 13)) * 1000n, used);
    buffer.writeBigInt64LE(handled, used + 8);
    used += 16;
  };
}

async function worker() {
  const handled = ledger();
  const running = new Worker("bench", async (job) => handled(job.data), {
    connection,
    concurrency: CONCURRENCY, // jobs wait for Redis only; the documentation says 100 to 300 for such
    removeOnComplete: { count: 0 }, // nothing is kept of what is done
    limiter: LIMIT ? { max: LIMIT, duration: 1000 } : undefined,
  });
  running.on("error", (error) => console.error(error));
  await running.waitUntilReady();
  process.once("SIGTERM", async () => {
    await running.close(true);
    process.exit(0);
  });
  process.send("ready");
}

async function work() {
  let stopping = false;
  const program = fileURLToPath(import.meta.url);
  const workers = Array.from({ length: PROCESSES }, () =>
    spawn(process.execPath, [program, "worker"], { stdio: ["ignore", 2, 2, "ipc"] }),
  );
  const ended = workers.map((child) => new Promise((resolve) => child.once("exit", resolve)));
  const stop = (code) => {
    if (stopping) return;
    stopping = true;
    for (const child of workers) child.kill("SIGTERM");
    setTimeout(() => workers.forEach((child) => child.kill("SIGKILL")), 10_000).unref();
    Promise.all(ended).then(() => process.exit(code));
  };
  process.on("SIGTERM", () => stop(0));
  process.on("SIGINT", () => stop(0));
  for (const end of ended) end.then(() => stop(1));
  await Promise.all(workers.map((child) => new Promise((resolve) => child.once("message", resolve))));
  console.log("ready");
}

function versions() {
  const of = (name) => JSON.parse(readFileSync(join(environment, "node_modules", name, "package.json"))).version;
  console.log(JSON.stringify({ bullmq: of("bullmq"), ioredis: of("ioredis"), node: process.versions.node }));
}

async function send(command, options) {
  const all = jobs(options);
  const seconds =
    command === "send-single"
      ? await sendEach(all, 1)
      : command === "send-concurrent"
        ? await sendEach(all, Number(options.tasks ?? 100))
        : await sendBulk(all);
  console.log(JSON.stringify({ sent: all.length, seconds }));
}

const names = ["count", "due-ms", "start-ms", "rate", "tasks"];
const { positionals, values } = parseArgs({
  allowPositionals: true,
  options: Object.fromEntries(names.map((name) => [name, { type: "string" }])),
});
const commands = { versions, work, worker };
const command = positionals[0];
if (command in commands) await commands[command]();
else await send(command, values);
