/** The longest time of a timer: setTimeout fires at once if it is longer. */
const LONGEST_TIMER_MS = 2 ** 31 - 1;

/** Call back after a time of any length. Returns a function that cancels the call. */
export function after(ms: number, callback: () => void): () => void {
  const endsAt = performance.now() + ms;
  let timer: ReturnType<typeof setTimeout>;
  const arm = () => {
    const leftMs = endsAt - performance.now();
    timer = leftMs > LONGEST_TIMER_MS
      ? setTimeout(arm, LONGEST_TIMER_MS)
      : setTimeout(callback, leftMs);
  };
  arm();
  return () => clearTimeout(timer);
}

/** Resolves after the given time, or as soon as the signal is aborted. */
export function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    if (signal?.aborted) return resolve();
    const end = () => {
      cancel();
      signal?.removeEventListener("abort", end);
      resolve();
    };
    const cancel = after(ms, end);
    signal?.addEventListener("abort", end);
  });
}

/** Pauses that double up to a limit, with jitter so that clients spread out. */
export class Backoff {
  readonly #firstMs: number;
  readonly #longestMs: number;
  #nextMs: number;

  constructor(firstMs: number, longestMs: number) {
    this.#firstMs = this.#nextMs = firstMs;
    this.#longestMs = longestMs;
  }

  /** The next pause; longer if the gateway asks for that, up to a minute. */
  next(retryAfterMs = 0): number {
    const ms = this.#nextMs * (1 + Math.random());
    this.#nextMs = Math.min(2 * this.#nextMs, this.#longestMs);
    return Math.max(ms, Math.min(retryAfterMs, LONGEST_RETRY_AFTER_MS));
  }

  reset(): void {
    this.#nextMs = this.#firstMs;
  }
}

/** A proxy's page may ask for a day; the gateway may be back much sooner. */
const LONGEST_RETRY_AFTER_MS = 60_000;
