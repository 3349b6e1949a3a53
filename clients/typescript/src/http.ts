// HTTP calls, repeated after faults where a repetition is safe.

import { LisaError, ProblemError, UnreachableError } from "./errors.js";
import { encode, parse } from "./json.js";
import { authorization, checkedUrl, duration } from "./options.js";
import type { Problem } from "./schema.js";
import { after, Backoff, sleep } from "./sleep.js";

const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 2_000;

export interface ClientOptions {
  /** The gateway's address, such as "http://127.0.0.1:8080". */
  url: string | URL;
  /** The bearer token, if the gateway requires one. */
  token?: string | undefined;
  /**
   * Maximum duration of a call and its repetitions, without the waiting time of a pull: 10 s.
   * Infinity means no limit.
   */
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

/** What an answer must look like: a check, or those of its elements or fields. */
export type Shape = ((value: unknown) => boolean) | Shape[] | Fields;
export interface Fields { [name: string]: Shape }

export const isText = (value: unknown) => typeof value === "string";
export const isNumber = (value: unknown) => typeof value === "number";
export const listOf = (shape: Shape) => (value: unknown) =>
  Array.isArray(value) && value.every((one) => fits(one, shape));
export const is = (expected: unknown) => (value: unknown) => value === expected;

interface Request extends CallOptions {
  content?: object;
  answer: Fields;
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
    this.#url = checkedUrl(options.url);
    if (options.token) this.#headers["authorization"] = authorization(options.token);
    this.#timeoutMs = duration("timeoutMs", options.timeoutMs, 10_000);
    // Browsers require that `fetch` is called without another `this`.
    this.#fetch = options.fetch ?? ((input, init) => fetch(input, init));
  }

  /** The JSON answer. Rejects with a LisaError or the signal's reason. */
  async call<T>(method: string, path: string, request: Request): Promise<T> {
    const { content, signal, waitMs = 0, repeat = "all" } = request;
    const body = content === undefined ? null : encode(content);
    const timeoutMs = duration("timeoutMs", request.timeoutMs, this.#timeoutMs);
    const deadline = performance.now() + timeoutMs;
    const backoff = new Backoff(FIRST_PAUSE_MS, LONGEST_PAUSE_MS);
    for (;;) {
      try {
        const leftMs = Math.max(deadline - performance.now(), FIRST_PAUSE_MS) + waitMs;
        const answer = await this.#callOnce(path, { method, body }, leftMs, signal, request.answer);
        return answer as T;
      } catch (error) {
        const pauseMs = backoff.next(retryAfterMs(error));
        if (!isRepeatable(error, repeat) || performance.now() + pauseMs > deadline) throw error;
        await sleep(pauseMs, signal);
      }
    }
  }

  async #callOnce(
    path: string, init: RequestInit, timeoutMs: number, signal: AbortSignal | undefined,
    shape: Shape,
  ): Promise<unknown> {
    signal?.throwIfAborted();
    const request = new AbortController();
    const abort = () => request.abort();
    const cancel = after(timeoutMs, abort);
    signal?.addEventListener("abort", abort);
    const failure = (why: string, options?: ErrorOptions) =>
      new UnreachableError(`${init.method} ${this.#url}${path}: ${why}`, options);
    try {
      const response = await this.#fetch(this.#url + path, {
        ...init, headers: this.#headers, signal: request.signal, redirect: "manual",
      });
      // The deliveries of an answer that has begun are held: read it to the end.
      signal?.removeEventListener("abort", abort);
      const text = await response.text();
      if (!response.ok) throw problemError(response, text);
      const answer = isJson(response) ? parsed(text) : undefined;
      if (fits(answer, shape)) return answer;
      throw failure(`the answer is not from Lisa's gateway: ${JSON.stringify(text.slice(0, 100))}`);
    } catch (error) {
      if (error instanceof LisaError) throw error;
      signal?.throwIfAborted();
      const { aborted } = request.signal;
      const why = aborted ? `no answer within ${Math.round(timeoutMs)} ms` : reasonOf(error);
      throw failure(why, { cause: error });
    } finally {
      cancel();
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

function problemOf(response: Response, text: string): Problem {
  const { status, statusText } = response;
  const problem = { type: "urn:lisa:problem:http", title: statusText, status, detail: "" };
  // Browsers hide the status of a redirect.
  if (response.type === "opaqueredirect" || (status >= 300 && status < 400)) {
    const target = response.headers.get("location");
    const to = target && URL.canParse(target) ? ` to ${new URL(target).origin}` : "";
    return { ...problem, detail: `url redirects${to}; use the address that answers` };
  }
  const answer = parsed(text);
  return fits(answer, { type: isText })
    ? { ...problem, ...(answer as object), status }
    : { ...problem, detail: text.slice(0, 200) };
}

function isJson({ headers }: Response): boolean {
  return /^application\/json\b/i.test(headers.get("content-type") ?? "");
}

function parsed(text: string): unknown {
  try {
    return parse(text);
  } catch {
    return undefined;
  }
}

export function fits(value: unknown, shape: Shape): boolean {
  if (typeof shape === "function") return shape(value);
  if (Array.isArray(shape)) {
    return Array.isArray(value) && value.length === shape.length
      && shape.every((one, index) => fits(value[index], one));
  }
  if (typeof value !== "object" || value === null || Array.isArray(value)) return false;
  const fields = value as Record<string, unknown>;
  return Object.entries(shape).every(([name, one]) => fits(fields[name], one));
}

/** fetch hides the reason of a failed connection in `cause`. */
function reasonOf(error: unknown): string {
  const cause = error instanceof Error && error.cause !== undefined ? error.cause : error;
  return cause instanceof Error ? cause.message || cause.name : String(cause);
}
