import { bodyOf } from "./bodies.js";
import { LisaError } from "./errors.js";
import { is, isText, type CallOptions, type Fields, type Http } from "./http.js";
import { isWellFormed } from "./json.js";
import type { AckAnswer, DeferAnswer, DeliveryAnswer, RetryAnswer } from "./schema.js";

/**
 * A delivered message, to be settled by `ack`, `retry`, `discard`, `defer` or `release`. A message
 * that is not settled is redelivered when its ack timeout ends.
 *
 * Calls are repeated after faults. They reject with a ProblemError of the kind "stale" if the
 * delivery is no longer held. If the answer to a release is lost, its repetition is stale, too.
 */
export class Delivery<T = unknown> {
  readonly id: string;
  /** The message's key, if it has one. */
  readonly key: string | undefined;
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
    this.key = answer.key;
    this.receipt = answer.receipt;
    this.attempt = answer.attempt;
    this.due_ms = answer.due_ms;
    this.headers = answer.headers;
    this.body = bodyOf(answer) as T;
  }

  /** Settle as handled: "acked", "late" (after the ack timeout), or "repeated" (acked before). */
  async ack(options?: CallOptions): Promise<AckAnswer["outcome"]> {
    return (await this.#call<AckAnswer>("ack", {}, OUTCOME, options)).outcome;
  }

  /** Settle as failed. Without `delay_ms`, the retry policy determines the pause. */
  retry(
    failure: { delay_ms?: number | undefined; reason?: string | undefined } = {},
    options?: CallOptions,
  ): Promise<RetryAnswer> {
    const fields = { ...failure, reason: shortened(failure.reason) };
    return this.#call("retry", fields, OUTCOME, options);
  }

  /** Move the message to garbage without further attempts. */
  discard(reason?: string, options?: CallOptions): Promise<RetryAnswer> {
    const fields = { reason: shortened(reason), discard: true };
    return this.#call("retry", fields, OUTCOME, options);
  }

  /**
   * Put the message off: it is redelivered after `delay_ms`, and no attempt is counted. With
   * `rests_lane`, for a limit that was met, no other message of its key is delivered meanwhile.
   */
  defer(
    deferral: {
      delay_ms: number; reason?: string | undefined; rests_lane?: boolean | undefined;
    },
    options?: CallOptions,
  ): Promise<DeferAnswer> {
    const fields = { ...deferral, reason: shortened(deferral.reason) };
    return this.#call("defer", fields, { outcome: is("deferred") }, options);
  }

  /** Restart the ack timeout; by default with the duration of the pull. */
  async extend(ack_timeout_ms?: number, options?: CallOptions): Promise<void> {
    await this.#call("extend", { ack_timeout_ms }, HELD, options);
  }

  /** Return the message for immediate redelivery, without counting an attempt. */
  async release(options?: CallOptions): Promise<void> {
    await this.#call("release", {}, HELD, options);
  }

  async #call<A>(
    verb: string, fields: object, answer: Fields, options: CallOptions = {},
  ): Promise<A> {
    const content = { receipt: this.receipt, ...fields };
    return this.#http.call("POST", messagePath(this.topic, this.id, `/${verb}`), {
      ...options, content, answer: { id: is(this.id), ...answer },
    });
  }
}

const OUTCOME = { outcome: isText };
const HELD = { held: is(true) };

/** The part of a reason that the gateway keeps, as valid text. */
function shortened(reason: string | undefined): string | undefined {
  if (reason === undefined) return undefined;
  return String(reason).slice(0, 1024).replace(/\p{Surrogate}/gu, "\uFFFD");
}

export function topicPath(topic: string): string {
  // In a path, `.` and `..` would be resolved.
  return `/v1/topics/${encodeURIComponent(checked("topic", topic, /^\.{0,2}$/))}`;
}

/** In a query, unlike in a path, nobody changes an id such as `..`. */
export function messagePath(topic: string, id: string, verb = ""): string {
  const query = encodeURIComponent(checked("id", id, /^$/));
  return `${topicPath(topic)}/message${verb}?id=${query}`;
}

export function keyPath(topic: string, key: string, verb = ""): string {
  return `${topicPath(topic)}/key${verb}?key=${encodeURIComponent(checked("key", key, /^$/))}`;
}

function checked(name: string, value: string, refused: RegExp): string {
  if (typeof value === "string" && isWellFormed(value) && !refused.test(value)) return value;
  throw new LisaError(`${name} ${JSON.stringify(value)} is not allowed`);
}
