// A consumer of Lisa's native API, for Node 18 or later. Nothing to install.

import { setTimeout as sleep } from "node:timers/promises";

const POLL_MS = 20_000;
const ACK_TIMEOUT_MS = 30_000;
const FIRST_PAUSE_MS = 200;
const LONGEST_PAUSE_MS = 10_000;

/** What the gateway answered other than success; `kind` is the problem's own word. */
export class Refused extends Error {
  constructor(status, problem, retryAfterMs) {
    super(problem.detail ?? `status ${status}`);
    this.status = status;
    this.kind = (problem.type ?? "").split(":").pop();
    this.problem = problem;
    this.retryAfterMs = retryAfterMs;
  }

  /** Whether the same request may succeed later. */
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

  /** `signal` gives the request up until its answer begins: that one is read to its end. */
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
    try { problem = JSON.parse(text); } catch { /* a proxy's own words */ }
    throw new Refused(answer.status, problem, seconds > 0 ? seconds * 1000 : undefined);
  }

  /** Send a message; safe to repeat if it has an id. Answers {id, outcome}. */
  send(body, options = {}) {
    return this.post("/messages", { body, ...options });
  }

  /** Say what became of a delivery: verb is ack, retry, extend or release. */
  settle(delivery, verb, more = {}) {
    const path = `/messages/${encodeURIComponent(delivery.id)}/${verb}`;
    return this.post(path, { receipt: delivery.receipt, ...more });
  }
}

/**
 * Pulls a topic's messages and runs `handler(delivery)` on them, `concurrency` at a time.
 *
 * A handler that returns acks its message, one that throws puts it to retry: by the topic's policy,
 * or after `error.delayMs`. While it runs its lease is renewed. Handlers have to bear a message twice.
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
    this.wake = () => {}; // whoever waits for a free place, or for the end
  }

  /** Until `stop` is called and what runs has finished, or its grace time is over. */
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
   * Take nothing more. A poll that waits is given up, which costs no message an attempt. (One whose
   * answer was on its way at that instant does: its messages come again after the ack timeout.)
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

  /** Safe to repeat: the gateway knows what it has done already. */
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
          return undefined; // another consumer gets it, once its lease is over
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
      this.log(`${left.length} not finished in time: given back`);
      await Promise.allSettled(left.map((delivery) => this.topic.settle(delivery, "release")));
    }
  }

  /** Until the time is over, or `stop` is called. */
  async #pause(ms) {
    await sleep(jittered(ms), undefined, { signal: this.stopping.signal }).catch(() => {});
  }
}

function reason(error) {
  return error?.cause?.message ?? error?.message ?? String(error);
}

/** Not all clients that were turned away come back at one instant. */
function jittered(ms) {
  return ms * (1 + Math.random());
}
