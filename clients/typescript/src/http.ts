// HTTP calls, repeated after faults where a repetition is safe.

import { LisaError, ProblemError, UnreachableError } from "./errors.js";
import type { Problem } from "./schema.js";
import { Backoff, sleep } from "./sleep.js";

const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 2_000;

export interface ClientOptions {
  /** The gateway's address, such as "http://127.0.0.1:8080". */
  url: string | URL;
  /** The bearer token, if the gateway requires one. */
  token?: string | undefined;
  /** Maximum duration of a call and its repetitions, without the waiting time of a pull: 10 s. */
  timeoutMs?: number | undefined;
  /** Replaces the global `fetch`, for example to use a proxy. */
  fetch?: typeof fetch | undefined;
}

export interface CallOptions {
  /** Ends the call; it then rejects with the signal's reason. */
  signal?: AbortSignal | undefined;
  /** Replaces the client's `timeoutMs`. */
  timeoutMs?: number | undefined;
}

/** The failed calls to repeat: all, those that certainly changed nothing, or none. */
export type Repeat = "all" | "refused" | "none";

interface Request extends CallOptions {
  content?: object;
  repeat?: Repeat;
  /** How long the gateway may wait before it answers. */
  waitMs?: number | undefined;
}

export class Http {
  readonly #url: string;
  readonly #headers: Record<string, string> = { "content-type": "application/json" };
  readonly #timeoutMs: number;
  readonly #fetch: typeof fetch;

  constructor(options: ClientOptions) {
    this.#url = new URL(options.url).href.replace(/\/+$/, "");
    if (options.token) this.#headers["authorization"] = `Bearer ${options.token}`;
    this.#timeoutMs = options.timeoutMs ?? 10_000;
    // Browsers require that `fetch` is called without another `this`.
    this.#fetch = options.fetch ?? ((input, init) => fetch(input, init));
  }

  /** The JSON answer. Rejects with ProblemError, UnreachableError or the signal's reason. */
  async call<T>(method: string, path: string, request: Request = {}): Promise<T> {
    const { content, signal, waitMs = 0, repeat = "all" } = request;
    const init = { method, body: content === undefined ? null : JSON.stringify(content) };
    const deadline = Date.now() + (request.timeoutMs ?? this.#timeoutMs);
    const backoff = new Backoff(FIRST_PAUSE_MS, LONGEST_PAUSE_MS);
    for (;;) {
      try {
        const leftMs = Math.max(deadline - Date.now(), FIRST_PAUSE_MS) + waitMs;
        return await this.#callOnce<T>(path, init, leftMs, signal);
      } catch (error) {
        const pauseMs = retryAfterMs(error) ?? backoff.next();
        if (!isRepeatable(error, repeat) || Date.now() + pauseMs > deadline) throw error;
        await sleep(pauseMs, signal);
      }
    }
  }

  async #callOnce<T>(
    path: string, init: RequestInit, timeoutMs: number, signal: AbortSignal | undefined,
  ): Promise<T> {
    signal?.throwIfAborted();
    const request = new AbortController();
    const abort = () => request.abort();
    const timer = setTimeout(abort, timeoutMs);
    signal?.addEventListener("abort", abort);
    try {
      const response = await this.#fetch(this.#url + path, {
        ...init, headers: this.#headers, signal: request.signal,
      });
      // The deliveries of an answer that has begun are held: read it to the end.
      signal?.removeEventListener("abort", abort);
      const text = await response.text();
      if (!response.ok) throw problemError(response, text);
      return parse<T>(text);
    } catch (error) {
      if (error instanceof LisaError) throw error;
      signal?.throwIfAborted();
      const why = request.signal.aborted ? `no answer within ${timeoutMs} ms` : reasonOf(error);
      throw new UnreachableError(`${init.method} ${this.#url}${path}: ${why}`, { cause: error });
    } finally {
      clearTimeout(timer);
      signal?.removeEventListener("abort", abort);
    }
  }
}

function isRepeatable(error: unknown, repeat: Repeat): boolean {
  if (repeat === "none") return false;
  if (error instanceof ProblemError && error.kind === "crowded") return true;
  const isOutage = error instanceof ProblemError && error.status >= 502 && error.status <= 504;
  return repeat === "all" && (isOutage || error instanceof UnreachableError);
}

export function retryAfterMs(error: unknown): number | undefined {
  return error instanceof ProblemError ? error.retryAfterMs : undefined;
}

function problemError(response: Response, text: string): ProblemError {
  const seconds = Number(response.headers.get("retry-after") ?? NaN);
  return new ProblemError(problemOf(response, text), seconds >= 0 ? seconds * 1000 : undefined);
}

function problemOf({ status, statusText }: Response, text: string): Problem {
  try {
    const problem = JSON.parse(text) as Problem;
    if (typeof problem.type === "string") return problem;
  } catch {
    // A proxy's error page.
  }
  return { type: "urn:lisa:problem:http", title: statusText, status, detail: text.slice(0, 200) };
}

function parse<T>(text: string): T {
  try {
    return JSON.parse(text) as T;
  } catch (error) {
    throw new UnreachableError("the answer is not JSON; is this Lisa's gateway?", { cause: error });
  }
}

/** fetch hides the reason of a failed connection in `cause`. */
function reasonOf(error: unknown): string {
  const cause = error instanceof Error && error.cause !== undefined ? error.cause : error;
  return cause instanceof Error ? cause.message || cause.name : String(cause);
}
