import { bodyOf, isCoalescing, isIdOf, requestOf, type OutgoingMessage } from "./bodies.js";
import { Delivery, keyPath, messagePath, topicPath } from "./delivery.js";
import { ProblemError } from "./errors.js";
import {
  fits, Http, is, isNumber, isText, listOf, type CallOptions, type ClientOptions, type Fields,
  type Repeat, type Shape,
} from "./http.js";
import type {
  BatchAnswer, KeyAnswer, KeyChangedAnswer, LimitedKeysAnswer, LimitsAnswer, LimitsChangedAnswer,
  LimitsRequest, MessageAnswer, PullAnswer, PullRequest, RescheduleRequest, SendAnswer,
} from "./schema.js";

export type CancelOutcome = "cancelled" | "in_flight" | "done" | "unknown";
export type RescheduleOutcome = "rescheduled" | "in_flight" | "done" | "unknown";

/** A message and its state. The body of a settled message is undefined. */
export interface FoundMessage<T = unknown> extends Omit<MessageAnswer, "body" | "body_base64"> {
  body: T | undefined;
}

/** A due time. */
export type Due =
  | { due_ms: number }
  | { delay_ms: number }
  | ({ at_local: string } & Omit<RescheduleRequest, "due_ms" | "delay_ms" | "at_local">);

/** A due time for all messages of a key, or by how much those that wait move. */
export type KeyDue = { due_ms: number } | { delay_ms: number } | { shift_ms: number };

/** Of which group limits are; by default those for all groups. */
export interface OfGroup { group?: string | null | undefined }

/** The longest pull that the gateway allows. */
const LONGEST_WAIT_MS = 60_000;

/** Sends, inspects and pulls messages. All methods reject with a LisaError. */
export class Client {
  readonly #http: Http;

  constructor(options: ClientOptions) {
    this.#http = new Http(options);
  }

  /** Send one message. */
  async send(
    topic: string, message: OutgoingMessage, options?: CallOptions,
  ): Promise<SendAnswer> {
    const content = requestOf(message);
    return this.#http.call("POST", `${topicPath(topic)}/messages`, {
      ...options, content, repeat: repeatOf([message]),
      answer: { id: isIdOf(content), outcome: isText },
    });
  }

  /**
   * Send up to 1,000 messages. Each has its own result: one that the gateway refuses has a
   * `problem`; the others are sent.
   */
  async sendBatch(
    topic: string, messages: readonly OutgoingMessage[], options?: CallOptions,
  ): Promise<BatchAnswer> {
    const content = { messages: messages.map(requestOf) };
    const results = content.messages.map((message): Shape => (one) =>
      fits(one, { id: isIdOf(message), outcome: isText })
        || fits(one, { problem: { type: isText } }));
    return this.#http.call("POST", `${topicPath(topic)}/messages:batch`, {
      ...options, content, repeat: repeatOf(messages), answer: { results },
    });
  }

  /** The message and its state; undefined if the id is unknown. */
  async get<T = unknown>(
    topic: string, id: string, options?: CallOptions,
  ): Promise<FoundMessage<T> | undefined> {
    try {
      const path = messagePath(topic, id);
      const answer = await this.#http.call<MessageAnswer>("GET", path, {
        ...options, answer: { ...FOUND, id: is(id) },
      });
      const { body_base64: _, ...found } = answer;
      return { ...found, body: bodyOf(answer) as T | undefined };
    } catch (error) {
      if (error instanceof ProblemError && isUnknown(error.kind)) return undefined;
      throw error;
    }
  }

  /** Cancel a message. Every outcome but "cancelled" means that nothing was changed. */
  cancel(topic: string, id: string, options?: CallOptions): Promise<CancelOutcome> {
    return this.#change("cancelled", "DELETE", topic, id, options);
  }

  /** Change a due time. Every outcome but "rescheduled" means that nothing was changed. */
  reschedule(
    topic: string, id: string, due: Due, options?: CallOptions,
  ): Promise<RescheduleOutcome> {
    return this.#change("rescheduled", "PATCH", topic, id, { ...options, content: due });
  }

  /** Make a message due now. */
  fire(topic: string, id: string, options?: CallOptions): Promise<RescheduleOutcome> {
    return this.#change("rescheduled", "POST", topic, id, options, "/fire");
  }

  /** A page of the live messages of a key, without their bodies. */
  async listKey(
    topic: string, key: string, query: { cursor?: string | null; limit?: number } = {},
    options?: CallOptions,
  ): Promise<KeyAnswer> {
    return this.#http.call("GET", `${keyPath(topic, key)}&${paging(query)}`, {
      ...options, answer: { key: is(key), count: isNumber, messages: listOf({ id: isText }) },
    });
  }

  /** Cancel all messages of a key. The outcomes are those of `cancel`. */
  cancelKey(topic: string, key: string, options?: CallOptions): Promise<KeyChangedAnswer> {
    return this.#changeKey("DELETE", topic, key, options);
  }

  /**
   * Reschedule all messages of a key. The outcomes are those of `reschedule`; with `shift_ms`, that
   * of a message that does not wait is its state, and a failed call is not repeated.
   */
  rescheduleKey(
    topic: string, key: string, due: KeyDue, options?: CallOptions,
  ): Promise<KeyChangedAnswer> {
    const repeat = "shift_ms" in due ? "refused" : "all";
    return this.#changeKey("PATCH", topic, key, { ...options, content: due, repeat });
  }

  /** Make all messages of a key due now. */
  fireKey(topic: string, key: string, options?: CallOptions): Promise<KeyChangedAnswer> {
    return this.#changeKey("POST", topic, key, options, "/fire");
  }

  /** A page of the keys of a topic that have limits: those for all groups, then by group. */
  async listLimits(
    topic: string, query: { cursor?: string | null; limit?: number } = {}, options?: CallOptions,
  ): Promise<LimitedKeysAnswer> {
    return this.#http.call("GET", `${topicPath(topic)}/limits?${paging(query)}`, {
      ...options, answer: { keys: listOf({ key: isText }) },
    });
  }

  /** The limits that were set for a key: for all groups, or for the `group`. */
  getLimits(
    topic: string, key: string, { group }: OfGroup = {}, options?: CallOptions,
  ): Promise<LimitsAnswer> {
    return this.#limits("GET", topic, key, group, options);
  }

  /** Replace the limits of a key. Those for a `group` take precedence over those for all groups. */
  setLimits(
    topic: string, key: string, { group, ...limits }: LimitsRequest & OfGroup,
    options?: CallOptions,
  ): Promise<LimitsChangedAnswer> {
    return this.#limits("PUT", topic, key, group, { ...options, content: limits });
  }

  /** Remove the limits of a key: those for all groups, or those for the `group`. */
  removeLimits(
    topic: string, key: string, { group }: OfGroup = {}, options?: CallOptions,
  ): Promise<LimitsChangedAnswer> {
    return this.#limits("DELETE", topic, key, group, options);
  }

  /**
   * Pull due messages and settle them yourself. Resolves as soon as a message is due, or with an
   * empty array after `wait_ms`. A failed pull is not repeated.
   */
  async pull<T = unknown>(
    topic: string, request: PullRequest = {}, options?: CallOptions,
  ): Promise<Delivery<T>[]> {
    const path = `${topicPath(topic)}/pull`;
    const waitMs = typeof request.wait_ms === "string" ? LONGEST_WAIT_MS : request.wait_ms;
    const answer = await this.#http.call<PullAnswer>("POST", path, {
      ...options, content: request, repeat: "none", waitMs, answer: PULLED,
    });
    return answer.deliveries.map((one) => new Delivery<T>(this.#http, topic, one));
  }

  async #limits<A extends LimitsAnswer>(
    method: string, topic: string, key: string, group: string | null | undefined,
    request: CallOptions & { content?: object } = {},
  ): Promise<A> {
    const query = group == null ? "" : `&group=${encodeURIComponent(group)}`;
    return this.#http.call(method, keyPath(topic, key, "/limits") + query, {
      ...request, answer: { key: is(key), group: is(group ?? null) },
    });
  }

  async #changeKey(
    method: string, topic: string, key: string,
    request: CallOptions & { content?: object; repeat?: Repeat } = {}, verb?: string,
  ): Promise<KeyChangedAnswer> {
    return this.#http.call(method, keyPath(topic, key, verb), {
      ...request,
      answer: {
        key: is(key), changed: isNumber, results: listOf({ id: isText, outcome: isText }),
      },
    });
  }

  async #change<O extends string>(
    outcome: O, method: string, topic: string, id: string,
    request: CallOptions & { content?: object } = {}, verb?: string,
  ): Promise<O | "in_flight" | "done" | "unknown"> {
    try {
      const answer = { id: is(id), outcome: is(outcome) };
      await this.#http.call(method, messagePath(topic, id, verb), { ...request, answer });
      return outcome;
    } catch (error) {
      const kind = error instanceof ProblemError ? error.kind : "";
      if (kind === "in-flight") return "in_flight";
      if (kind === "done") return "done";
      if (isUnknown(kind)) return "unknown";
      throw error;
    }
  }
}

function paging({ cursor, limit }: { cursor?: string | null; limit?: number }): string {
  const query = new URLSearchParams();
  if (cursor != null) query.set("cursor", cursor);
  if (limit !== undefined) query.set("limit", String(limit));
  return query.toString();
}

const FOUND: Fields = { state: isText, topic: isText, attempts: isNumber, headers: {}, groups: {} };
const PULLED: Fields = {
  deliveries: listOf({
    id: isText, receipt: isText, attempt: isNumber, due_ms: isNumber, headers: {},
  }),
};

/** Whether an id is unknown; a topic that does not exist has no messages. */
function isUnknown(kind: string): boolean {
  return kind === "unknown-message" || kind === "unknown-topic";
}

/**
 * With another `on_duplicate` than "keep", a repeated call would meet its own first message. A
 * message that coalesces with others could take the place of a later one.
 */
function repeatOf(messages: readonly OutgoingMessage[]): Repeat {
  const isSafe = (one: OutgoingMessage) =>
    (one.on_duplicate ?? "keep") === "keep" && !isCoalescing(one);
  return messages.every(isSafe) ? "all" : "refused";
}
