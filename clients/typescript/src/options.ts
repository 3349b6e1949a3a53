// Checks of the options of clients and workers.

import { LisaError } from "./errors.js";

/** A duration in milliseconds. Infinity means no limit, if the option allows it. */
export function duration(
  name: string, ms: number | undefined, otherwise: number, longest = Infinity,
): number {
  if (ms === undefined) return otherwise;
  if (typeof ms === "number" && ms >= 0 && ms <= longest) return ms;
  const limit = longest === Infinity ? "0 or more" : `0 to ${longest}`;
  throw new LisaError(`${name} must be ${limit} milliseconds, not ${String(ms)}`);
}

/** The gateway's URL without a trailing slash. Errors do not show what may be a secret. */
export function checkedUrl(given: string | URL): string {
  const text = String(given);
  const url = URL.canParse(text) ? new URL(text) : undefined;
  if (text.includes("@")) {
    throw new LisaError("url must not contain user info (@): use the option `token`");
  }
  if (url?.search || url?.hash || /[?#]/.test(text)) {
    throw new LisaError("url must have neither a query (?) nor a fragment (#)");
  }
  if (url?.protocol !== "http:" && url?.protocol !== "https:") {
    throw new LisaError(`url must be like "http://127.0.0.1:8080", not ${JSON.stringify(text)}`);
  }
  return url.href.replace(/\/+$/, "");
}

/** The header of a token. */
export function authorization(token: string): string {
  if (!/^[\x21-\x7e]+$/.test(token)) {
    throw new LisaError("token must be visible ASCII characters, without spaces and newlines");
  }
  return `Bearer ${token}`;
}
