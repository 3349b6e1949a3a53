// Generated from the OpenAPI document by `make reference`.

/**
 * A message to send. Due now, or according to one of `delay_ms`, `due_ms` and `at_local`.
 */
export interface SendRequest {
  /** Any JSON value. Exactly one of `body` and `body_base64`. */
  body?: unknown;
  /** A binary body in base64 (RFC 4648, section 4). */
  body_base64?: string | null;
  /** Counted from the server's clock, so the client's clock does not matter. */
  delay_ms?: number | string | null;
  /** Epoch milliseconds, UTC. */
  due_ms?: number | null;
  /**
   * A wall time in `tz`, as in "2026-12-24T09:00": the message is due when that clock shows
   * it, also if the zone's rules change until then. A time that a change of the clock skips is
   * due at the end of the gap.
   */
  at_local?: string | null;
  /** The time zone of local times, and of a `window` that names none. */
  tz?: string | null;
  /** Of a local time that occurs twice, 0 selects the first and 1 the second. */
  fold?: 0 | 1 | null;
  /**
   * With at_local "10:00": at that time on the n-th business day after today; 0 is today or
   * the next one. The days on which `window` opens, else Monday to Friday.
   */
  business_days?: number | null;
  /**
   * What the message concerns, such as an order: 1 to 256 bytes. All messages of a key can be
   * listed, cancelled and rescheduled together, and ids have to be unique only within their
   * key.
   */
  key?: string | null;
  /**
   * When the message may be handed over, as in "mon-fri 9-17"; outside it, the message moves
   * to the next opening. It takes precedence over the topic's window.
   */
  window?: string | null;
  /** Your own id, for idempotent sends; by default an id is generated. */
  id?: string | null;
  /** How long after its due time the message is still worth handling. */
  ttl_ms?: number | string | null;
  /** At most 65,535 bytes, as JSON. */
  headers?: Record<string, string> | null;
  /**
   * The message's own pauses between attempts: a list of durations, or text such as "0,0,2m".
   * An empty list means a single attempt.
   */
  retry?: Array<number | string> | string | null;
  /**
   * What to do if a manager promotes the message too late, as after an outage: `{"after":
   * "10m", "then": "skip"}` or "skip after 10m"; also "garbage", or "run". By default the
   * topic's option.
   */
  late?: Record<string, string> | string | null;
  /**
   * How many messages it counts as where a rate or `fair` applies: 1 to 1,000, by default 1.
   */
  cost?: number | null;
  /**
   * How much later than due the message may start without harm. Where messages have to wait,
   * those with the earliest due time plus slack come first. By default the topic's option.
   */
  slack_ms?: number | string | null;
  /**
   * Of a key's sends, only the last is handled, once there was none for this long. Each
   * replaces the one before, unless a handler has begun with that. Needs `key`, as do the next
   * two; the message has a fixed id, and is due as the option says.
   */
  debounce_ms?: number | string | null;
  /** With `debounce`, the longest time from the first of these sends until one is due. */
  max_wait_ms?: number | string | null;
  /**
   * Of a key's sends, one is due at once, and the next one not before this time has passed
   * since. Of those in between, the last is handled.
   */
  throttle_ms?: number | string | null;
  /**
   * True if the message replaces the last one of its key that no handler has begun with, and
   * is due when that one was.
   */
  latest?: boolean | null;
  /**
   * If the id is known, "keep" the earlier message (the default), "keep_live" (keep it only if
   * it has not ended), "replace" it, "update" it (replace all but its due time), or "reject"
   * the new one.
   */
  on_duplicate?: OnDuplicate | null;
}

/**
 * What to do with a message whose id is live, or was settled within the retention. KEEP_LIVE
 * keeps a live message, and replaces one that was settled, cancelled or is in garbage.
 * UPDATE replaces all but the due time of a message that waits to be handed out, and
 * otherwise replaces it.
 */
export type OnDuplicate =
  | "keep"
  | "keep_live"
  | "reject"
  | "replace"
  | "update";

/**
 * A new due time. Exactly one of `due_ms`, `delay_ms` and `at_local`. Outside the window of
 * the message or of its topic, it moves to the next opening. Without `tz`, a local time is
 * one in the zone of the message's own window.
 */
export interface RescheduleRequest {
  /** Counted from the server's clock, so the client's clock does not matter. */
  delay_ms?: number | string | null;
  /** Epoch milliseconds, UTC. */
  due_ms?: number | null;
  /**
   * A wall time in `tz`, as in "2026-12-24T09:00": the message is due when that clock shows
   * it, also if the zone's rules change until then. A time that a change of the clock skips is
   * due at the end of the gap.
   */
  at_local?: string | null;
  /** The time zone of local times, and of a `window` that names none. */
  tz?: string | null;
  /** Of a local time that occurs twice, 0 selects the first and 1 the second. */
  fold?: 0 | 1 | null;
  /**
   * With at_local "10:00": at that time on the n-th business day after today; 0 is today or
   * the next one. The days on which `window` opens, else Monday to Friday.
   */
  business_days?: number | null;
}

/**
 * Limits of a key, in place of those of its topic. What is omitted stays that of the topic.
 */
export interface LimitsRequest {
  rate?: string | null;
  concurrency?: number | null;
  weight?: number | null;
}

/** A pull. The response is sent with the first messages, or empty after `wait_ms`. */
export interface PullRequest {
  max?: number;
  wait_ms?: number | string;
  /** When an unsettled delivery is redelivered; defaults to the topic's option. */
  ack_timeout_ms?: number | string | null;
  /** Defaults to the topic's only group. */
  group?: string | null;
}

/** The outcome of sending one message. */
export interface SendAnswer {
  id: string;
  /** The message's key. Omitted if it has none. */
  key?: string;
  outcome: Sent;
}

/**
 * Outcome of sending one message. REPLACED_IN_FLIGHT: a consumer holds the earlier message.
 * The new one is sent, but a handler may still get the earlier one, or be at work on it.
 */
export type Sent =
  | "accepted"
  | "duplicate"
  | "rejected"
  | "replaced"
  | "replaced_in_flight"
  | "updated";

/** The results in request order, and counts by outcome. */
export interface BatchAnswer {
  results: Array<BatchResult>;
  accepted: number;
  duplicate: number;
  replaced: number;
  replaced_in_flight: number;
  updated: number;
  rejected: number;
  /** Messages with a problem, which may have to be sent again. */
  failed: number;
}

/** The result for one message of a batch: an outcome, or its problem. */
export interface BatchResult {
  id?: string;
  key?: string;
  outcome?: Sent;
  problem?: Problem;
}

/** A problem document (RFC 9457). Programs should check `type`. */
export interface Problem {
  type: string;
  title: string;
  status: number;
  detail: string;
  id?: string;
  key?: string;
  outcome?: string;
  state?: string;
  held?: boolean;
}

/** The current state of a message. A settled message has neither body nor headers. */
export interface MessageAnswer {
  state: State;
  due_ms: number | null;
  /** Attempts started, including the current one. */
  attempts: number;
  /**
   * How often the message was deferred since its last failure, without counting an attempt.
   */
  deferrals: number;
  /** The consumer that holds the message. Null unless it is in flight. */
  consumer: string | null;
  /** Time since the delivery or its last extension. Null unless the message is in flight. */
  idle_ms: number | null;
  reason: string | null;
  /** In garbage: where the handler raised, at most the last 2 KiB. Else null. */
  traceback: string | null;
  id: string;
  /** The message's key. Omitted if it has none. */
  key?: string;
  topic: string;
  headers: Record<string, string>;
  groups: Record<string, GroupStateAnswer>;
  body?: unknown;
  body_base64?: string;
}

/** A message's state. The last five are final. */
export type State =
  | "acked"
  | "cancelled"
  | "expired"
  | "garbage"
  | "in_flight"
  | "parked"
  | "purged"
  | "ready"
  | "retry"
  | "skipped"
  | "waiting";

/** The state of a message in one group. */
export interface GroupStateAnswer {
  state: State;
  due_ms: number | null;
  /** Attempts started, including the current one. */
  attempts: number;
  /**
   * How often the message was deferred since its last failure, without counting an attempt.
   */
  deferrals: number;
  /** The consumer that holds the message. Null unless it is in flight. */
  consumer: string | null;
  /** Time since the delivery or its last extension. Null unless the message is in flight. */
  idle_ms: number | null;
  reason: string | null;
  /** In garbage: where the handler raised, at most the last 2 KiB. Else null. */
  traceback: string | null;
}

/**
 * A page of the key's live messages. `count` is that of all pages; `cursor` null at the end.
 */
export interface KeyAnswer {
  topic: string;
  key: string;
  count: number;
  messages: Array<KeyedMessage>;
  cursor: string | null;
}

/** The current state of a message of the key, without its body. */
export interface KeyedMessage {
  state: State;
  due_ms: number | null;
  /** Attempts started, including the current one. */
  attempts: number;
  /**
   * How often the message was deferred since its last failure, without counting an attempt.
   */
  deferrals: number;
  /** The consumer that holds the message. Null unless it is in flight. */
  consumer: string | null;
  /** Time since the delivery or its last extension. Null unless the message is in flight. */
  idle_ms: number | null;
  reason: string | null;
  /** In garbage: where the handler raised, at most the last 2 KiB. Else null. */
  traceback: string | null;
  id: string;
  /** The message's key. */
  key: string;
  groups: Record<string, GroupStateAnswer>;
}

/**
 * The outcome of each message, as that of the same change of a single one. `changed` counts
 * the messages that were changed. With `shift_ms`, the outcome of a message that does not
 * wait is its state.
 */
export interface KeyChangedAnswer {
  topic: string;
  key: string;
  changed: number;
  results: Array<KeyedOutcome>;
}

/** What was done to one message. */
export interface KeyedOutcome {
  id: string;
  /** The message's key. Omitted if it has none. */
  key?: string;
  outcome: "cancelled" | "in_flight" | "done" | "unknown" | "rescheduled" | "ready" | "parked" | "retry" | "garbage" | "acked" | "expired" | "skipped" | "purged";
}

/**
 * A page of keys with limits: those for all groups, then by group; `cursor` null at the end.
 */
export interface LimitedKeysAnswer {
  topic: string;
  keys: Array<LimitsAnswer>;
  cursor: string | null;
}

/**
 * The limits that were set for a key; null for those that it does not have. `group` is null
 * if they apply to all groups.
 */
export interface LimitsAnswer {
  key: string;
  group: string | null;
  rate: string | null;
  concurrency: number | null;
  weight: number | null;
}

/** The limits of a key, and whether this call changed them. */
export interface LimitsChangedAnswer {
  key: string;
  group: string | null;
  rate: string | null;
  concurrency: number | null;
  weight: number | null;
  changed: boolean;
}

/** The deliveries; empty if no message became due in time. */
export interface PullAnswer {
  deliveries: Array<DeliveryAnswer>;
}

/** One delivered message, held until its ack timeout. */
export interface DeliveryAnswer {
  id: string;
  /** The message's key. Omitted if it has none. */
  key?: string;
  receipt: string;
  /** 1 for the first delivery. */
  attempt: number;
  due_ms: number;
  headers: Record<string, string>;
  body?: unknown;
  body_base64?: string;
}

/**
 * The delivery is settled. `late`: after its ack timeout; `repeated`: already acked before.
 */
export interface AckAnswer {
  id: string;
  /** The message's key. Omitted if it has none. */
  key?: string;
  outcome: "acked" | "late" | "repeated";
}

/** The outcome: `retrying` at `due_ms`, or `dead`, which means in garbage. */
export interface RetryAnswer {
  id: string;
  /** The message's key. Omitted if it has none. */
  key?: string;
  outcome: "retrying" | "dead";
  due_ms: number | null;
  /** Failed attempts. */
  attempts: number;
}

/** The message is deferred until `due_ms`. */
export interface DeferAnswer {
  id: string;
  /** The message's key. Omitted if it has none. */
  key?: string;
  outcome: "deferred";
  due_ms: number;
}
