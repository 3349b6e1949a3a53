import { bodyOf } from "./bodies.js";
import type { CallOptions, Http } from "./http.js";
import type { AckAnswer, DeliveryAnswer, RetryAnswer } from "./schema.js";

/**
 * A delivered message, to be settled by `ack`, `retry`, `discard` or `release`. A message that is
 * not settled is redelivered when its ack timeout ends.
 *
 * Calls are repeated after faults. They reject with a ProblemError of the kind "stale" if the
 * delivery is no longer held. If the answer to a release is lost, its repetition is stale, too.
 */
export class Delivery<T = unknown> {
  readonly id: string;
  readonly topic: string;
  readonly receipt: string;
  /** 1 for the first delivery. */
  readonly attempt: number;
  readonly due_ms: number;
  readonly headers: Readonly<Record<string, string>>;
  /** A JSON value, or bytes as a Uint8Array. */
  readonly body: T;
  readonly #http: Http;

  constructor(http: Http, topic: string, answer: DeliveryAnswer) {
    this.#http = http;
    this.topic = topic;
    this.id = answer.id;
    this.receipt = answer.receipt;
    this.attempt = answer.attempt;
    this.due_ms = answer.due_ms;
    this.headers = answer.headers;
    this.body = bodyOf(answer) as T;
  }

  /** Settle as handled: "acked", "late" (after the ack timeout), or "repeated" (acked before). */
  async ack(options?: CallOptions): Promise<AckAnswer["outcome"]> {
    return (await this.#call<AckAnswer>("ack", {}, options)).outcome;
  }

  /** Settle as failed. Without `delay_ms`, the retry policy determines the pause. */
  retry(
    failure: { delay_ms?: number | undefined; reason?: string | undefined } = {},
    options?: CallOptions,
  ): Promise<RetryAnswer> {
    return this.#call("retry", failure, options);
  }

  /** Move the message to garbage without further attempts. */
  discard(reason?: string, options?: CallOptions): Promise<RetryAnswer> {
    return this.#call("retry", { reason, discard: true }, options);
  }

  /** Restart the ack timeout; by default with the duration of the pull. */
  async extend(ack_timeout_ms?: number, options?: CallOptions): Promise<void> {
    await this.#call("extend", { ack_timeout_ms }, options);
  }

  /** Return the message for immediate redelivery, without counting an attempt. */
  async release(options?: CallOptions): Promise<void> {
    await this.#call("release", {}, options);
  }

  #call<A>(verb: string, fields: object, options: CallOptions = {}): Promise<A> {
    const content = { receipt: this.receipt, ...fields };
    return this.#http.call("POST", `${messagePath(this.topic, this.id)}/${verb}`, {
      ...options, content,
    });
  }
}

export function topicPath(topic: string): string {
  return `/v1/topics/${encodeURIComponent(topic)}`;
}

export function messagePath(topic: string, id: string): string {
  return `${topicPath(topic)}/messages/${encodeURIComponent(id)}`;
}
