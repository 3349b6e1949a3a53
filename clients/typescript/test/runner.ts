// Performs the steps of clients/conformance/scenarios.yml. The arguments are the gateway's URL, a
// token, and the client's timeout in milliseconds.
//
// Reads steps from standard input, one JSON object per line, performs them concurrently, and
// prints the result of each: {"number", "value"} or {"number", "error"}.

import { createInterface } from "node:readline";

import {
  Client, DeferError, DiscardError, ProblemError, RetryError, UnreachableError, Worker,
  type Delivery,
} from "lisa-delay-queue";
import { encode, parse } from "../dist/json.js";

/** What a handler does: see scenarios.yml. */
interface Body {
  fails?: number;
  with?: "retry" | "defer" | "discard" | "panic";
  delay_ms?: number;
  rests_lane?: boolean;
  holds?: boolean;
}

const [url = "", token, timeoutMs] = process.argv.slice(2);
const client = new Client({ url, token, timeoutMs: Number(timeoutMs), fetch: faultyFetch });
const deliveries = new Map<string, Delivery>();
const faults: string[] = [];
let worker: Worker<Body> | undefined;
let run: Promise<unknown> | undefined;
let stopAtAnswer = false;
let release: (() => void)[] = [];
let report = newReport();

const steps: Record<string, (topic: string, given: any) => unknown> = {
  send: (topic, given) => client.send(topic, message(given)),
  send_batch: async (topic, given) =>
    (await client.sendBatch(topic, given.map(message))).results.map(({ problem, ...result }) =>
      problem ? { problem: new ProblemError(problem).kind } : result),
  get: async (topic, id) => {
    const found = await client.get(topic, id);
    return found ? { ...found, ...shown(found.body) } : null;
  },
  cancel: (topic, id) => client.cancel(topic, id),
  reschedule: (topic, { id, ...due }) => client.reschedule(topic, id, due),
  fire: (topic, id) => client.fire(topic, id),
  list_key: (topic, key) => client.listKey(topic, key),
  cancel_key: (topic, key) => client.cancelKey(topic, key),
  reschedule_key: (topic, { key, ...due }) => client.rescheduleKey(topic, key, due),
  fire_key: (topic, key) => client.fireKey(topic, key),
  list_limits: async (topic) => { // page by page, one key at a time
    const found = [];
    for (let cursor: string | null | undefined; cursor !== null;) {
      const page = await client.listLimits(topic, { cursor: cursor ?? null, limit: 1 });
      found.push(...page.keys);
      cursor = page.cursor;
    }
    return found;
  },
  get_limits: (topic, { key, ...of }) => client.getLimits(topic, key, of),
  set_limits: async (topic, { key, ...limits }) => { await client.setLimits(topic, key, limits); },
  remove_limits: async (topic, { key, ...of }) => { await client.removeLimits(topic, key, of); },
  pull: async (topic, { cancelled_after_ms, ...given }) => {
    const signal = cancelled_after_ms ? AbortSignal.timeout(cancelled_after_ms) : undefined;
    const pulled = await client.pull(topic, given, { signal });
    for (const one of pulled) deliveries.set(nameOf(one), one);
    return pulled.map((one) => ({ ...one, ...shown(one.body) }));
  },
  ack: (_, name) => held(name).ack(),
  retry: async (_, { of, ...failure }) => (await held(of).retry(failure)).outcome,
  defer: async (_, { of, ...deferral }) => (await held(of).defer(deferral)).outcome,
  discard: async (_, { of, reason }) => (await held(of).discard(reason)).outcome,
  extend: (_, name) => held(name).extend(),
  release: (_, name) => held(name).release(),
  faults: (_, given) => { faults.push(...given); },
  faults_left: () => faults.length,
  start_worker: (topic, { stops_at_answer = false, ...given }) => {
    stopAtAnswer = stops_at_answer;
    report = newReport();
    worker = new Worker<Body>(client, topic, handle, {
      concurrency: given.concurrency,
      group: given.group,
      ackTimeoutMs: given.ack_timeout_ms,
      waitMs: given.wait_ms,
      graceMs: given.grace_ms,
      onError: (error) => console.error(String(error)),
    });
    run = worker.run();
    run.catch(() => {}); // `worker_ended` reports the error
  },
  worker: () => ({ ...report, started: [...report.started].sort(), ended: report.ended.sort() }),
  finish_handlers: () => { for (const one of release.splice(0)) one(); },
  stop_worker: () => worker?.stop(),
  worker_ended: async () => { await run; },
};

function newReport() {
  return { started: [] as string[], ended: [] as string[], aborted: [] as string[], most: 0 };
}

async function handle(message: Delivery<Body>, signal: AbortSignal): Promise<void> {
  const name = nameOf(message);
  report.started.push(name);
  report.most = Math.max(report.most, report.started.length - report.ended.length);
  if (message.body.holds) {
    await new Promise<void>((resolve) => {
      release.push(resolve);
      signal.addEventListener("abort", () => { report.aborted.push(name); resolve(); });
    });
  }
  report.ended.push(name);
  if (report.started.filter((one) => one.startsWith(`${message.id}/`)).length
      > (message.body.fails ?? 0)) return;
  if (message.body.with === "discard") throw new DiscardError("no such order");
  if (message.body.with === "retry") {
    throw new RetryError("closed", { delayMs: message.body.delay_ms });
  }
  if (message.body.with === "defer") {
    const { delay_ms: delayMs = 0, rests_lane: restsLane } = message.body;
    throw new DeferError("busy", { delayMs, restsLane });
  }
  if (message.body.with === "panic") throw undefined;
  throw new Error("broken");
}

async function faultyFetch(...request: Parameters<typeof fetch>): Promise<Response> {
  const fault = faults.shift();
  if (fault === "lose_request") throw new TypeError("fetch failed");
  if (fault === "hang") await aborted(request[1]!.signal!);
  if (fault === "error_page") return new Response("<h1>Bad Gateway</h1>", { status: 502 });
  if (fault === "crowded" || fault === "server-unavailable") return unavailable(fault);
  const response = await fetch(...request);
  if (fault === "lose_answer") throw new TypeError("terminated");
  if (!stopAtAnswer || !String(request[0]).endsWith("/pull")) return response;
  return new Response(stoppingBody(await response.text(), request[1]!.signal!), response);
}

/** Stops the worker when the client begins to read; fails if that ends the request. */
function stoppingBody(text: string, signal: AbortSignal): ReadableStream {
  return new ReadableStream({
    pull(controller) {
      worker?.stop();
      if (signal.aborted) return controller.error(signal.reason);
      controller.enqueue(new TextEncoder().encode(text));
      controller.close();
    },
  }, { highWaterMark: 0 });
}

function aborted(signal: AbortSignal): Promise<never> {
  return new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
}

function unavailable(kind: string): Response {
  const type = `urn:lisa:problem:${kind}`;
  const problem = { type, title: "Service Unavailable", status: 503, detail: "injected" };
  return Response.json(problem, { status: 503, headers: { "retry-after": "0" } });
}

function message({ bytes, ...fields }: any) {
  return bytes === undefined ? fields : { ...fields, body: Buffer.from(bytes, "base64") };
}

function shown(body: unknown) {
  if (!(body instanceof Uint8Array)) return { body };
  return { body: undefined, bytes: Buffer.from(body).toString("base64") };
}

function nameOf({ id, attempt }: { id: string; attempt: number }): string {
  return `${id}/${attempt}`;
}

function held(name: string): Delivery {
  const delivery = deliveries.get(name);
  if (!delivery) throw new Error(`no delivery ${name}`);
  return delivery;
}

function kindOf(error: unknown): string {
  if (error instanceof ProblemError) return error.kind;
  if (error instanceof UnreachableError) return "unreachable";
  return error instanceof Error && error.name === "TimeoutError" ? "cancelled" : String(error);
}

createInterface({ input: process.stdin }).on("line", async (line) => {
  const { number, name, topic, given } = parse(line) as any;
  try {
    const value = await steps[name]!(topic, given);
    console.log(encode({ number, value: value ?? null }));
  } catch (error) {
    console.log(JSON.stringify({ number, error: kindOf(error) }));
  }
});
