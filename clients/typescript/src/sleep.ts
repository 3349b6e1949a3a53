/** Resolves after the given time, or as soon as the signal is aborted. */
export function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    if (signal?.aborted) return resolve();
    const end = () => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, ms);
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

  next(): number {
    const ms = this.#nextMs * (1 + Math.random());
    this.#nextMs = Math.min(2 * this.#nextMs, this.#longestMs);
    return ms;
  }

  reset(): void {
    this.#nextMs = this.#firstMs;
  }
}
