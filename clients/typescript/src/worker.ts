import type { Client } from "./client.js";
import type { Delivery } from "./delivery.js";
import {
  DeferError, DiscardError, LisaError, ProblemError, RetryError, UnreachableError,
} from "./errors.js";
import { retryAfterMs } from "./http.js";
import { duration } from "./options.js";
import { Backoff, sleep } from "./sleep.js";

const FIRST_PAUSE_MS = 200;
const LONGEST_PAUSE_MS = 5_000;
const RELEASE_TIMEOUT_MS = 2_000;
/** The longest ack timeout that the gateway allows. */
const THIRTY_DAYS_MS = 30 * 86_400_000;

export interface WorkerOptions {
  /** Maximum number of running handlers, 1 to 500: 1. */
  concurrency?: number | undefined;
  /** By default the topic's only group. */
  group?: string | undefined;
  /** How long a message is held for this worker; extended while its handler runs: 30 s. */
  ackTimeoutMs?: number | undefined;
  /** Duration of a long poll, at most 60 s: 20 s. */
  waitMs?: number | undefined;
  /** How long `stop` waits for running handlers: 10 s. */
  graceMs?: number | undefined;
  /** Receives each error that does not end the worker; by default, console.error prints it. */
  onError?: ((error: unknown) => void) | undefined;
}

/**
 * Handles one message. Delivery is at-least-once, so handlers should be idempotent. `signal` is
 * aborted when the worker loses the message, or when the grace time of `stop` is over.
 */
export type Handler<T> = (message: Delivery<T>, signal: AbortSignal) => unknown;

/** Pulls a topic's messages, calls a handler with each, and settles them by its outcome. */
export class Worker<T = unknown> {
  readonly #client: Client;
  readonly #topic: string;
  readonly #handler: Handler<T>;
  readonly #group: string | undefined;
  readonly #concurrency: number;
  readonly #ackTimeoutMs: number;
  readonly #waitMs: number;
  readonly #graceMs: number;
  readonly #onError: (error: unknown) => void;
  /** The messages whose handlers run. */
  readonly #running = new Map<Delivery<T>, { ended: Promise<void>; abort: AbortController }>();
  readonly #stopping = new AbortController();
  /** Continues a loop that waits for a handler to end. */
  #wake = () => {};
  #hasRun = false;

  constructor(client: Client, topic: string, handler: Handler<T>, options: WorkerOptions = {}) {
    this.#client = client;
    this.#topic = topic;
    this.#handler = handler;
    this.#group = options.group;
    this.#concurrency = options.concurrency ?? 1;
    this.#ackTimeoutMs = duration("ackTimeoutMs", options.ackTimeoutMs, 30_000, THIRTY_DAYS_MS);
    this.#waitMs = duration("waitMs", options.waitMs, 20_000, 60_000);
    this.#graceMs = duration("graceMs", options.graceMs, 10_000);
    this.#onError = options.onError ?? ((error) => console.error("lisa:", error));
    if (!Number.isInteger(this.#concurrency) || this.#concurrency < 1 || this.#concurrency > 500) {
      throw new LisaError(`concurrency must be an integer from 1 to 500, not ${this.#concurrency}`);
    }
  }

  /**
   * Work until `stop` is called; resolves when the running handlers have ended or the grace time
   * is over. Rejects with a ProblemError if the gateway refuses the pulls, for example because of
   * a wrong token. Outages do not end a worker.
   */
  async run(): Promise<void> {
    if (this.#hasRun) throw new LisaError("a worker runs only once; create another one");
    this.#hasRun = true;
    try {
      await this.#work();
    } finally {
      await this.#finish();
    }
  }

  /** Stop pulling, so that `run` resolves. */
  stop(): void {
    this.#stopping.abort();
    this.#wake();
  }

  async #work(): Promise<void> {
    const { signal } = this.#stopping;
    const backoff = new Backoff(FIRST_PAUSE_MS, LONGEST_PAUSE_MS);
    while (!signal.aborted) {
      const free = this.#concurrency - this.#running.size;
      if (free === 0) {
        await new Promise<void>((resolve) => { this.#wake = resolve; });
        continue;
      }
      try {
        const deliveries = await this.#pull(free);
        if (signal.aborted) return await this.#release(deliveries);
        for (const delivery of deliveries) this.#start(delivery);
        backoff.reset();
      } catch (error) {
        if (signal.aborted) return;
        if (isFinal(error)) throw error;
        this.#onError(error);
        await sleep(backoff.next(retryAfterMs(error)), signal);
      }
    }
  }

  #pull(max: number): Promise<Delivery<T>[]> {
    const request = {
      max, group: this.#group ?? null, wait_ms: this.#waitMs, ack_timeout_ms: this.#ackTimeoutMs,
    };
    return this.#client.pull<T>(this.#topic, request, { signal: this.#stopping.signal });
  }

  #start(delivery: Delivery<T>): void {
    const handling = { abort: new AbortController(), ended: Promise.resolve() };
    this.#running.set(delivery, handling); // before the handler, which may throw at once
    handling.ended = this.#handle(delivery, handling.abort).finally(() => {
      this.#running.delete(delivery);
      this.#wake();
    });
  }

  async #handle(delivery: Delivery<T>, abort: AbortController): Promise<void> {
    const handled = new AbortController();
    void this.#extend(delivery, abort, handled.signal);
    let settle = (): Promise<unknown> => delivery.ack();
    try {
      await this.#handler(delivery, abort.signal);
    } catch (error) {
      settle = () => fail(delivery, error);
    }
    handled.abort();
    if (!this.#running.has(delivery)) return; // released after the grace time
    await settle().catch(this.#onError);
  }

  /** Extend the ack timeout until the handler has ended. Aborts the handler if that fails. */
  async #extend(
    delivery: Delivery<T>, abort: AbortController, handled: AbortSignal,
  ): Promise<void> {
    const intervalMs = this.#ackTimeoutMs / 3;
    let heldUntil = performance.now() + this.#ackTimeoutMs;
    for (;;) {
      const sleptAt = performance.now();
      await sleep(intervalMs, handled);
      const sleptMs = performance.now() - sleptAt;
      if (sleptMs > this.#ackTimeoutMs) this.#onError(this.#blocked(delivery, sleptMs));
      if (handled.aborted) return;
      const calledAt = performance.now();
      try {
        await delivery.extend(undefined, { signal: handled, timeoutMs: intervalMs });
        heldUntil = calledAt + this.#ackTimeoutMs;
      } catch (error) {
        if (handled.aborted) return;
        this.#onError(error);
        const isLost = error instanceof ProblemError && error.status < 500;
        if (isLost || performance.now() >= heldUntil) return abort.abort(error);
      }
    }
  }

  /** Nothing else runs while a handler blocks the event loop, so no call extended the timeout. */
  #blocked({ topic, id }: Delivery<T>, ms: number): LisaError {
    return new LisaError(
      `topic ${topic}: the event loop was blocked for ${Math.round(ms)} ms, longer than the ack `
      + `timeout of ${this.#ackTimeoutMs} ms, so message ${JSON.stringify(id)} may be handled `
      + "twice: move blocking work into a worker thread, or set a longer ackTimeoutMs",
    );
  }

  /** Wait for running handlers until the grace time is over; then release their messages. */
  async #finish(): Promise<void> {
    const ended = new AbortController();
    const handlers = Promise.all([...this.#running.values()].map((one) => one.ended));
    await Promise.race([handlers, sleep(this.#graceMs, ended.signal)]);
    ended.abort();
    const left = [...this.#running];
    this.#running.clear();
    for (const [, { abort }] of left) abort.abort(new LisaError("the worker has stopped"));
    await this.#release(left.map(([delivery]) => delivery));
  }

  async #release(deliveries: Delivery<T>[]): Promise<void> {
    await Promise.all(deliveries.map((delivery) =>
      delivery.release({ timeoutMs: RELEASE_TIMEOUT_MS }).catch(this.#onError)));
  }
}

/**
 * An AggregateError is a failure if one of its errors is. Otherwise a retry counts before a
 * deferral, and that before a discard, which would be final; of two alike, the longer delay.
 */
async function fail<T>(delivery: Delivery<T>, error: unknown): Promise<void> {
  const causes = causesOf(error);
  const reason = [...new Set(causes.map(textOf))].join("; ");
  const retries = causes.filter((one) => one instanceof RetryError);
  const deferrals = causes.filter((one) => one instanceof DeferError);
  const discards = causes.filter((one) => one instanceof DiscardError);
  const isFailure = retries.length + deferrals.length + discards.length < causes.length;
  try {
    if (isFailure || retries.some(({ delayMs }) => delayMs === undefined)) {
      await delivery.retry({ reason });
    } else if (retries.length > 0) {
      await delivery.retry({ delay_ms: Math.max(...retries.map((one) => one.delayMs!)), reason });
    } else if (deferrals.length > 0) {
      const { delayMs: delay_ms, restsLane: rests_lane } = deferrals.reduce((longest, one) =>
        one.delayMs > longest.delayMs ? one : longest);
      await delivery.defer({ delay_ms, reason, rests_lane });
    } else {
      await delivery.discard(reason);
    }
  } catch (refusal) {
    // Without a valid delay, as one of centuries, the policy determines the pause.
    const isInvalid = refusal instanceof ProblemError && refusal.kind === "invalid";
    if (isInvalid) await delivery.retry({ reason });
    throw refusal;
  }
}

function causesOf(error: unknown): unknown[] {
  const isGroup = error instanceof AggregateError && error.errors.length > 0;
  return isGroup ? error.errors.flatMap(causesOf) : [error];
}

function textOf(error: unknown): string {
  const isOutcome = [RetryError, DeferError, DiscardError].some((one) => error instanceof one);
  try {
    return isOutcome ? (error as Error).message : String(error);
  } catch {
    return "the handler threw an object that cannot be converted to text";
  }
}

/** Whether pulls will keep failing, for example because of a wrong token. */
function isFinal(error: unknown): boolean {
  if (!(error instanceof ProblemError)) return !(error instanceof UnreachableError);
  if (error.status >= 500) return false;
  const isPassing = error.kind === "unknown-group" || error.kind === "removal-unfinished";
  return !isPassing && error.status !== 408 && error.status !== 429;
}
