import { bodyOf, requestOf, type OutgoingMessage } from "./bodies.js";
import { Delivery, messagePath, topicPath } from "./delivery.js";
import { ProblemError } from "./errors.js";
import { Http, type CallOptions, type ClientOptions, type Repeat } from "./http.js";
import type { BatchAnswer, MessageAnswer, PullAnswer, PullRequest, SendAnswer } from "./schema.js";

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
  | { at_local: string; tz?: string; fold?: 0 | 1; business_days?: number };

/** The longest pull that the gateway allows. */
const LONGEST_WAIT_MS = 60_000;

/** Sends, inspects and pulls messages. All methods reject with a LisaError. */
export class Client {
  readonly #http: Http;

  constructor(options: ClientOptions) {
    this.#http = new Http(options);
  }

  /** Send one message. */
  send(topic: string, message: OutgoingMessage, options?: CallOptions): Promise<SendAnswer> {
    return this.#http.call("POST", `${topicPath(topic)}/messages`, {
      ...options, content: requestOf(message), repeat: repeatOf([message]),
    });
  }

  /**
   * Send up to 1,000 messages. Each has its own result: an invalid message has a `problem`; the
   * others are sent.
   */
  sendBatch(
    topic: string, messages: readonly OutgoingMessage[], options?: CallOptions,
  ): Promise<BatchAnswer> {
    const content = { messages: messages.map(requestOf) };
    return this.#http.call("POST", `${topicPath(topic)}/messages:batch`, {
      ...options, content, repeat: repeatOf(messages),
    });
  }

  /** The message and its state; undefined if the id is unknown. */
  async get<T = unknown>(
    topic: string, id: string, options?: CallOptions,
  ): Promise<FoundMessage<T> | undefined> {
    try {
      const path = messagePath(topic, id);
      const answer = await this.#http.call<MessageAnswer>("GET", path, options);
      const { body_base64: _, ...found } = answer;
      return { ...found, body: bodyOf(answer) as T | undefined };
    } catch (error) {
      if (error instanceof ProblemError && isUnknown(error.kind)) return undefined;
      throw error;
    }
  }

  /** Cancel a message. Every outcome but "cancelled" means that nothing was changed. */
  cancel(topic: string, id: string, options?: CallOptions): Promise<CancelOutcome> {
    return this.#change("DELETE", messagePath(topic, id), options);
  }

  /** Change a due time. Every outcome but "rescheduled" means that nothing was changed. */
  reschedule(
    topic: string, id: string, due: Due, options?: CallOptions,
  ): Promise<RescheduleOutcome> {
    return this.#change("PATCH", messagePath(topic, id), { ...options, content: due });
  }

  /** Make a message due now. */
  fire(topic: string, id: string, options?: CallOptions): Promise<RescheduleOutcome> {
    return this.#change("POST", `${messagePath(topic, id)}/fire`, options);
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
      ...options, content: request, repeat: "none", waitMs,
    });
    return answer.deliveries.map((one) => new Delivery<T>(this.#http, topic, one));
  }

  async #change<O extends string>(
    method: string, path: string, request: CallOptions & { content?: object } = {},
  ): Promise<O | "in_flight" | "done" | "unknown"> {
    try {
      return (await this.#http.call<{ outcome: O }>(method, path, request)).outcome;
    } catch (error) {
      const kind = error instanceof ProblemError ? error.kind : "";
      if (kind === "in-flight") return "in_flight";
      if (kind === "done") return "done";
      if (isUnknown(kind)) return "unknown";
      throw error;
    }
  }
}

/** Whether an id is unknown; a topic that does not exist has no messages. */
function isUnknown(kind: string): boolean {
  return kind === "unknown-message" || kind === "unknown-topic";
}

/** With another `on_duplicate` than "keep", a repeated call would meet its own first message. */
function repeatOf(messages: readonly OutgoingMessage[]): Repeat {
  return messages.every((one) => (one.on_duplicate ?? "keep") === "keep") ? "all" : "refused";
}
