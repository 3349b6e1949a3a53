// What the client does without a gateway: it refuses arguments, and answers of others.

import assert from "node:assert/strict";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { test } from "node:test";

import { Client, DeferError, DiscardError, LisaError, RetryError, Worker } from "lisa-delay-queue";
import { Backoff, sleep } from "../dist/sleep.js";

type Answer = (init: RequestInit) => Response | Promise<Response>;

const url = "http://127.0.0.1:9";
const pulled = () => Response.json({
  deliveries: [{ id: "a", receipt: "r", attempt: 1, due_ms: 0, headers: {}, body: 1 }],
});

/** A client that gets one answer after the other, and the last one again and again. */
function clientOf(...answers: Answer[]) {
  const requests: string[] = [];
  const client = new Client({
    url, timeoutMs: 0,
    fetch: async (target, init = {}) => {
      requests.push(`${init.method} ${String(target).slice(url.length)} ${init.body}`);
      return (answers.length > 1 ? answers.shift() : answers[0])!(init);
    },
  });
  return { client, requests };
}

/** Every call, by its name, of a client whose first answer is `pulled`. */
async function callsOf(client: Client): Promise<[string, () => Promise<unknown>][]> {
  const held = (await client.pull("t"))[0]!;
  return Object.entries({
    send: () => client.send("t", { body: 1, id: "a" }),
    sendBatch: () => client.sendBatch("t", [{ body: 1, id: "a" }]),
    get: () => client.get("t", "a"),
    cancel: () => client.cancel("t", "a"),
    reschedule: () => client.reschedule("t", "a", { delay_ms: 1 }),
    fire: () => client.fire("t", "a"),
    listKey: () => client.listKey("t", "k"),
    cancelKey: () => client.cancelKey("t", "k"),
    listLimits: () => client.listLimits("t"),
    getLimits: () => client.getLimits("t", "k"),
    setLimits: () => client.setLimits("t", "k", { rate: "2/s" }),
    removeLimits: () => client.removeLimits("t", "k", { group: "g" }),
    pull: () => client.pull("t"),
    ack: () => held.ack(),
    retry: () => held.retry(),
    discard: () => held.discard(),
    defer: () => held.defer({ delay_ms: 1 }),
    extend: () => held.extend(),
    release: () => held.release(),
  });
}

class Private { readonly #amount = 1; amount() { return this.#amount; } }
const cycle: Record<string, unknown> = { one: {} };
cycle["one"] = [cycle];
let deep: unknown = 1;
for (let level = 0; level < 100_000; level++) deep = [deep];

test("a value without JSON is refused with its path, before any request", async () => {
  const { client, requests } = clientOf(pulled);
  const held = (await client.pull("t"))[0]!;
  const values: unknown[] = [
    NaN, Infinity, new Set([1]), new Map([["a", 1]]), new Date("never"), new ArrayBuffer(3),
    new Float64Array(2), new DataView(new ArrayBuffer(1)), Buffer.from("x"), [undefined], [,],
    () => 1, Symbol("s"), /x/, new Error("x"), Promise.resolve(1), new Private(), new WeakMap(),
    new URLSearchParams("a=1"), cycle, deep, "\ud800", 2 ** 53, { toJSON: () => undefined },
  ];
  const refused = (call: () => Promise<unknown>, path: string) => assert.rejects(call, (error) =>
    error instanceof LisaError && error.message.startsWith(path));
  for (const value of values) {
    await refused(() => client.send("t", { body: { list: [{ value }] } }), "body.list[0].value");
  }
  for (const body of [undefined, NaN, new Set(), new ArrayBuffer(1), new Uint16Array(1)]) {
    await refused(() => client.send("t", { body }), "body");
  }
  const text = NaN as unknown as string;
  const due = NaN;
  const paths: [string, () => Promise<unknown>][] = [
    ["delay_ms", () => client.send("t", { body: 1, delay_ms: due })],
    ["delay_ms", () => client.send("t", { body: 1, delay_ms: Infinity })],
    ["due_ms", () => client.send("t", { body: 1, due_ms: new Date("never").getTime() })],
    ["due_ms", () => client.send("t", { body: 1, due_ms: new Date("never") as never })],
    ["ttl_ms", () => client.send("t", { body: 1, ttl_ms: due })],
    ["retry[1]", () => client.send("t", { body: 1, retry: [1, due] })],
    ["headers.trace", () => client.send("t", { body: 1, headers: { trace: text } })],
    ["id", () => client.send("t", { body: 1, id: text })],
    ["messages[1].delay_ms",
      () => client.sendBatch("t", [{ body: 1 }, { body: 1, delay_ms: due }])],
    ["due_ms", () => client.reschedule("t", "a", { due_ms: due })],
    ["fold", () => client.reschedule("t", "a", { at_local: "09:00", fold: due as 0 })],
    ["wait_ms", () => client.pull("t", { wait_ms: due })],
    ["delay_ms", () => held.retry({ delay_ms: due })],
    ["delay_ms", () => held.defer({ delay_ms: due })],
    ["ack_timeout_ms", () => held.extend(due)],
    ["timeoutMs", () => client.get("t", "a", { timeoutMs: due })],
    ["id", () => client.cancel("t", undefined as never)],
    ["weight", () => client.setLimits("t", "k", { weight: due })],
    ["key", () => client.getLimits("t", "")],
    ["key", () => client.listKey("t", "")],
    ["key", () => client.cancelKey("t", "\ud800")],
    ["topic", () => client.listLimits("..")],
    ["id", () => client.get("t", "")],
    ["id", () => client.fire("t", "\ud800")],
    ["topic", () => client.get("..", "a")],
    ["topic", () => client.pull(".")],
  ];
  for (const [path, call] of paths) await refused(call, path);
  assert.equal(requests.length, 1); // the pull
  assert.throws(() => new RetryError("later", { delayMs: due }), LisaError);
  assert.throws(() => new DeferError("later", { delayMs: undefined as never }), LisaError);
  for (const option of ["ackTimeoutMs", "waitMs", "graceMs", "concurrency"]) {
    assert.throws(() => new Worker(client, "t", () => {}, { [option]: due }), LisaError);
  }
});

test("JSON values are sent as JSON.stringify writes them", async () => {
  class Order { readonly number = 1; readonly at = new Date(0); }
  const body = [
    null, true, -0, 1.5, 1e300, 5e-324, "\u2028\"", {}, [], { a: undefined, "": [new Order()] },
    Object.create(null), JSON.parse('{"__proto__": 1}'), new URL("http://h/"),
  ];
  const { client, requests } = clientOf(() => Response.json({ id: "a", outcome: "accepted" }));
  await client.send("t", { body, id: "a" });
  assert.equal(requests[0], `POST /v1/topics/t/messages ${JSON.stringify({ id: "a", body })}`);
});

test("an answer of another shape is an error of every call", async () => {
  const json = { "content-type": "application/json" };
  const others: Record<string, Answer> = {
    "HTML": () => new Response("<html>", { headers: { "content-type": "text/html" } }),
    "no content": () => new Response(null, { status: 204 }),
    "no text": () => new Response("", { headers: json }),
    "null": () => Response.json(null),
    "a list": () => Response.json([]),
    "no fields": () => Response.json({}),
    "no results": () => Response.json({ results: [{}], deliveries: [{}] }),
    "another message": () => Response.json({ id: "b", outcome: "acked", held: true }),
    "text": () => new Response(
      '{"id":"a","outcome":"acked","held":true,"deliveries":[],"results":[1]}'),
    "fields of other types": () => Response.json({
      id: "a", outcome: 1, held: "true", deliveries: [{}], results: {}, state: "acked",
    }),
  };
  for (const [what, other] of Object.entries(others)) {
    for (const [name, call] of await callsOf(clientOf(pulled, other).client)) {
      await assert.rejects(call, LisaError, `${name}: ${what}`);
    }
  }
});

test("no call follows a redirect", async () => {
  const seen: string[] = [];
  const server = createServer((request, response) => {
    seen.push(request.url!);
    if (request.url!.endsWith("/pull") && seen.length === 1) {
      pulled().text().then((text) =>
        response.writeHead(200, { "content-type": "application/json" }).end(text));
    } else {
      response.writeHead(seen.length % 2 ? 301 : 307, { location: "/elsewhere?secret" }).end();
    }
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const { port } = server.address() as AddressInfo;
  const client = new Client({ url: `http://127.0.0.1:${port}` });
  for (const [name, call] of await callsOf(client)) {
    await assert.rejects(call, /30[17].*redirect/, name);
  }
  assert.equal(seen.length, 20);
  assert.ok(!seen.includes("/elsewhere?secret"));
  server.closeAllConnections();
  server.close();
});

test("a bad URL or token is refused without its secrets", () => {
  for (const bad of [
    "127.0.0.1:8080", "localhost:8080", "", "ftp://h", "http://", "/v1", "http://u:secret@h",
    "http://secret@h", "http://u:sec/ret@h", "http://:22000#secret@h", "u:secret@h:8080",
    "http://h?token=secret", "h:80?secret", "http://h/#secret", "http://u:se cret@h:8080",
  ]) {
    assert.throws(() => new Client({ url: bad }), (error) =>
      error instanceof LisaError && /^url (?!.*sec)/.test(error.message));
  }
  for (const token of ["secret\n", "sec ret", "sécret"]) {
    assert.throws(() => new Client({ url, token }), (error) =>
      error instanceof LisaError && !/s.?c.?ret/.test(error.message));
  }
  for (const good of ["https://h", "http://[::1]:8080/", new URL("http://h/lisa")]) {
    assert.ok(new Client({ url: good, token: "secret" }));
  }
});

test("times of any length are waited for", async () => {
  for (const ms of [2 ** 31, 2 ** 40, Infinity]) {
    const ended = new AbortController();
    const winner = await Promise.race([
      sleep(ms, ended.signal).then(() => "early"), sleep(20).then(() => "waits"),
    ]);
    ended.abort();
    assert.equal(winner, "waits");
  }
  const { client } = clientOf(async ({ signal }) => {
    await sleep(20, signal!);
    signal!.throwIfAborted();
    return Response.json({ id: "a", outcome: "accepted" });
  });
  await client.send("t", { body: 1, id: "a" }, { timeoutMs: Infinity });
  assert.equal(new Backoff(1, 1).next(86_400_000), 60_000);
  assert.ok(new Backoff(100, 100).next(0) >= 100);
});

const done = () => Response.json({ id: "a", outcome: "acked", held: true });
const invalid = () => Response.json({ type: "urn:lisa:problem:invalid" }, { status: 400 });

/** Run a worker whose handler gets one message, and stop it in the handler. */
async function workOnce(handler: () => unknown, options: object, ...answers: Answer[]) {
  const { client, requests } = clientOf(pulled, ...answers, done);
  const errors: string[] = [];
  const onError = (error: unknown) => { errors.push(String(error)); };
  const worker = new Worker(client, "orders", () => { worker.stop(); return handler(); }, {
    onError, ...options,
  });
  await worker.run();
  return { requests: requests.slice(1), errors };
}

test("a worker without a limit of grace waits for its handler", async () => {
  const { requests } = await workOnce(() => sleep(50), { graceMs: Infinity });
  assert.match(requests.join(), /^POST .*message\/ack\?id=a [^,]*$/);
});

test("a handler that blocks the event loop beyond the ack timeout is reported", async () => {
  const block = () => { for (const end = Date.now() + 200; Date.now() < end;); };
  const { errors } = await workOnce(block, { ackTimeoutMs: 100 });
  assert.match(errors.join(), /^LisaError: topic orders: the event loop was blocked .*"a"/);
  assert.deepEqual((await workOnce(() => sleep(200), { ackTimeoutMs: 100 })).errors, []);
});

test("whatever a handler throws fails its message only", async () => {
  for (const thrown of [Object.create(null), Symbol("s"), new Error("\ud800"), undefined]) {
    const { requests } = await workOnce(() => { throw thrown; }, {});
    assert.match(requests.join(), /^POST .*message\/retry\?id=a .*"reason":"[^"]+"}$/);
  }
});

test("a delay that the gateway refuses leaves the pause to the policy", async () => {
  for (const failure of [RetryError, DeferError]) {
    const handler = () => { throw new failure("closed", { delayMs: 1e15 }); };
    const { requests, errors } = await workOnce(handler, {}, invalid);
    assert.match(requests[1]!, /retry\?id=a {"receipt":"r","reason":"closed"}$/);
    assert.equal(errors.length, 1);
  }
});

test("of several errors, a failure counts first, and a discard last", async () => {
  const [discard, broken] = [new DiscardError("gone"), new Error("broken")];
  const [soon, late] = [100, 200].map((delayMs) => new RetryError("closed", { delayMs }));
  const defer = new DeferError("busy", { delayMs: 50 });
  const limited = new DeferError("enough", { delayMs: 60, restsLane: true });
  const cases: [unknown[], string][] = [
    [[discard, new AggregateError([discard])], 'retry {"reason":"gone","discard":true}'],
    [[discard, defer], 'defer {"delay_ms":50,"reason":"gone; busy"}'],
    [[limited, defer], 'defer {"delay_ms":60,"reason":"enough; busy","rests_lane":true}'],
    [[defer, late, soon], 'retry {"delay_ms":200,"reason":"busy; closed"}'],
    [[late, new RetryError("closed")], 'retry {"reason":"closed"}'],
    [[discard, broken], 'retry {"reason":"gone; Error: broken"}'],
    [[], 'retry {"reason":"AggregateError: none"}'],
  ];
  for (const [errors, expected] of cases) {
    const { requests } = await workOnce(() => { throw new AggregateError(errors, "none"); }, {});
    const found = requests.join().replace(/.*message.(\w+)\?id=a /, "$1 ");
    assert.equal(found.replace('"receipt":"r",', ""), expected);
  }
});
