// The errors of this package:
//
//     LisaError              also: an argument is invalid; nothing was sent
//     ├── ProblemError       the gateway answered with an error
//     ├── UnreachableError   no answer of a gateway arrived in time
//     ├── RetryError         thrown by a handler: retry the message
//     ├── DeferError         thrown by a handler: not now; no attempt counts
//     └── DiscardError       thrown by a handler: give the message up

import type { Problem } from "./schema.js";

/** Base class of all errors of this package. */
export class LisaError extends Error {
  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** An error answer of the gateway, or of a proxy in front of the gateway. */
export class ProblemError extends LisaError {
  readonly status: number;
  /**
   * The last part of the problem's `type`, such as "topic-full"; the HTTP API's reference lists
   * all kinds. It is "http" if the answer is no problem document.
   */
  readonly kind: string;
  readonly problem: Problem;
  /** How long the gateway asks to wait before the next call. */
  readonly retryAfterMs: number | undefined;

  constructor(problem: Problem, retryAfterMs?: number) {
    super(`${problem.status} ${problem.title}: ${problem.detail}`);
    this.status = problem.status;
    this.kind = problem.type.split(":").pop() ?? "";
    this.problem = problem;
    this.retryAfterMs = retryAfterMs;
  }
}

/** No complete answer of a gateway arrived in time. The call may have taken effect. */
export class UnreachableError extends LisaError {}

/** Thrown by a handler: retry the message, after `delayMs` or the pause of its retry policy. */
export class RetryError extends LisaError {
  readonly delayMs: number | undefined;

  constructor(reason: string, { delayMs }: { delayMs?: number | undefined } = {}) {
    super(reason);
    this.delayMs = delayMs === undefined ? undefined : checkedDelay(delayMs);
  }
}

/**
 * Thrown by a handler: redeliver the message after `delayMs`, without counting an attempt. With
 * `restsLane`, for a limit that was met, no other message of its key is delivered meanwhile.
 */
export class DeferError extends LisaError {
  readonly delayMs: number;
  readonly restsLane: boolean | undefined;

  constructor(
    reason: string,
    { delayMs, restsLane }: { delayMs: number; restsLane?: boolean | undefined },
  ) {
    super(reason);
    this.delayMs = checkedDelay(delayMs);
    this.restsLane = restsLane;
  }
}

/** Thrown by a handler: move the message to garbage without further attempts. */
export class DiscardError extends LisaError {}

function checkedDelay(ms: number): number {
  if (typeof ms === "number" && ms >= 0 && ms < Infinity) return ms;
  throw new LisaError(`delayMs must be 0 or more milliseconds, not ${String(ms)}`);
}
