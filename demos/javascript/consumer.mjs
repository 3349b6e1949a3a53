// A consumer of Lisa's native API, for Node 18 or later. Nothing to install.

import { setTimeout as sleep } from "node:timers/promises";

const POLL_MS = 20_000;
const ACK_TIMEOUT_MS = 30_000;
const FIRST_PAUSE_MS = 200;
const LONGEST_PAUSE_MS = 10_000;

/** An error answer of the gateway; `kind` is the last part of the problem's type. */
export class Refused extends Error {
  constructor(status, problem, retryAfterMs) {
    super(problem.detail ?? `status ${status}`);
    this.status = status;
    this.kind = (problem.type ?? "").split(":").pop();
    this.problem = problem;
    this.retryAfterMs = retryAfterMs;
  }

  /** Whether a repeated request may succeed. */
  get passes() {
    return this.status === 429 || this.status >= 500;
  }
}

/** One topic of one gateway. */
export class Topic {
  constructor({ url = "http://127.0.0.1:8080", topic, token }) {
    this.base = `${url}/v1/topics/${encodeURIComponent(topic)}`;
    this.headers = { "content-type": "application/json" };
    if (token) this.headers.authorization = `Bearer ${token}`;
  }

  /** `signal` aborts the request until its answer begins; a started answer is read completely. */
  async post(path, content, signal) {
    const waiting = new AbortController();
    const giveUp = () => waiting.abort();
    if (signal?.aborted) giveUp();
    signal?.addEventListener("abort", giveUp);
    const answer = await fetch(this.base + path, {
      method: "POST", headers: this.headers, body: JSON.stringify(content), signal: waiting.signal,
    }).finally(() => signal?.removeEventListener("abort", giveUp));
    const text = await answer.text();
    if (answer.ok) return JSON.parse(text);
    const seconds = Number(answer.headers.get("retry-after"));
    let problem = {};
    try { problem = JSON.parse(text); } catch { /* a proxy's error page */ }
    throw new Refused(answer.status, problem, seconds > 0 ? seconds * 1000 : undefined);
  }

  /** Send a message; idempotent if the message has an id. Returns {id, outcome}. */
  send(body, options = {}) {
    return this.post("/messages", { body, ...options });
  }

  /** Settle or extend a delivery: verb is ack, retry, extend or release. */
  settle(delivery, verb, more = {}) {
    const path = `/messages/${encodeURIComponent(delivery.id)}/${verb}`;
    return this.post(path, { receipt: delivery.receipt, ...more });
  }
}

/**
 * Pulls a topic's messages and runs `handler(delivery)` on them, `concurrency` at a time.
 *
 * When the handler returns, the message is acked. When it throws, the message is retried by the topic's
 * retry policy, or after `error.delayMs`. While the handler runs, the lease is renewed. Delivery is
 * at-least-once, so handlers should be idempotent.
 */
export class Consumer {
  constructor({ handler, concurrency = 4, group, graceMs = 10_000, log = console.error, ...topic }) {
    this.topic = new Topic(topic);
    this.handler = handler;
    this.concurrency = concurrency;
    this.group = group;
    this.graceMs = graceMs;
    this.log = log;
    this.running = new Map();
    this.stopping = new AbortController();
    this.wake = () => {}; // resolves when a handler ends, or on stop
  }

  /** Run until `stop` is called and the running handlers have finished or the grace time is over. */
  async run() {
    try {
      await this.#work();
    } finally {
      await this.#finish();
    }
  }

  async #work() {
    let pauseMs = FIRST_PAUSE_MS;
    while (!this.stopping.signal.aborted) {
      const free = this.concurrency - this.running.size;
      if (free === 0) {
        await new Promise((wake) => { this.wake = wake; });
        continue;
      }
      try {
        for (const delivery of await this.#pull(free)) this.#begin(delivery);
        pauseMs = FIRST_PAUSE_MS;
      } catch (error) {
        if (this.stopping.signal.aborted) return;
        if (error instanceof Refused && !error.passes) throw error;
        this.log(`pull: ${reason(error)}`);
        await this.#pause(error.retryAfterMs ?? pauseMs);
        pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS);
      }
    }
  }

  /**
   * Stop pulling. Aborting a waiting poll costs no message an attempt. (Exception: if the answer is
   * already on its way, its messages are redelivered after the ack timeout.)
   */
  stop() {
    this.stopping.abort();
    this.wake();
  }

  async #pull(max) {
    const wanted = { max, wait_ms: POLL_MS, ack_timeout_ms: ACK_TIMEOUT_MS, group: this.group };
    return (await this.topic.post("/pull", wanted, this.stopping.signal)).deliveries;
  }

  #begin(delivery) {
    const work = this.#handle(delivery).finally(() => {
      this.running.delete(delivery);
      this.wake();
    });
    this.running.set(delivery, work);
  }

  async #handle(delivery) {
    const renewal = setInterval(() => {
      this.topic.settle(delivery, "extend").catch((error) => this.log(`extend: ${reason(error)}`));
    }, ACK_TIMEOUT_MS / 3);
    let verdict = ["ack", {}];
    try {
      await this.handler(delivery);
    } catch (error) {
      verdict = ["retry", { reason: String(error?.message ?? error), delay_ms: error?.delayMs }];
    } finally {
      clearInterval(renewal);
    }
    await this.#settle(delivery, ...verdict);
  }

  /** Repeat the call until it is answered: settling is idempotent. */
  async #settle(delivery, verb, more) {
    const ends = Date.now() + ACK_TIMEOUT_MS;
    let pauseMs = FIRST_PAUSE_MS;
    for (;;) {
      try {
        return await this.topic.settle(delivery, verb, more);
      } catch (error) {
        const isFinal = error instanceof Refused && !error.passes;
        if (isFinal || Date.now() > ends) {
          this.log(`${verb} ${delivery.id}: ${reason(error)}`);
          return undefined; // another consumer gets the message after its lease
        }
        await sleep(error.retryAfterMs ?? jittered(pauseMs));
        pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS);
      }
    }
  }

  async #finish() {
    const done = Promise.allSettled([...this.running.values()]);
    const inTime = await Promise.race([done.then(() => true), sleep(this.graceMs, false)]);
    if (!inTime) {
      const left = [...this.running.keys()];
      this.log(`${left.length} not finished in time: released`);
      await Promise.allSettled(left.map((delivery) => this.topic.settle(delivery, "release")));
    }
  }

  /** Wait for the given time, or until `stop` is called. */
  async #pause(ms) {
    await sleep(jittered(ms), undefined, { signal: this.stopping.signal }).catch(() => {});
  }
}

function reason(error) {
  return error?.cause?.message ?? error?.message ?? String(error);
}

/** Prevents all rejected clients from returning at the same time. */
function jittered(ms) {
  return ms * (1 + Math.random());
}
