// Message bodies: JSON values, or bytes in base64.

import { LisaError } from "./errors.js";
import type { SendRequest } from "./schema.js";

/** A message to send: due now, or according to either `delay_ms` or `due_ms`. */
export interface OutgoingMessage extends Omit<SendRequest, "body" | "body_base64"> {
  /** Any JSON value, with a bigint for an integer beyond 2^53 - 1; or bytes. */
  body: unknown;
}

/**
 * The message as the API expects it. A generated id makes it safe to repeat the call; a message
 * that coalesces with others of its key has none of its own.
 */
export function requestOf({ body, id, ...fields }: OutgoingMessage): SendRequest {
  const own = isCoalescing(fields) ? id : id ?? randomId();
  const request = own == null ? fields : { ...fields, id: own };
  if (body === undefined) throw new LisaError("body must not be undefined; send null instead");
  return isBytes(body) ? { ...request, body_base64: base64(body) } : { ...request, body };
}

/** Whether a send becomes one with others of its key. */
export function isCoalescing(
  { debounce_ms, throttle_ms, latest }: Pick<SendRequest, "debounce_ms" | "throttle_ms" | "latest">,
): boolean {
  return debounce_ms != null || throttle_ms != null || latest === true;
}

/** Whether a value is the id that the gateway gives to a message. */
export function isIdOf({ id, key }: SendRequest): (value: unknown) => boolean {
  const start = key == null ? "" : `${key}${KEY_END}`;
  return (value) => id == null
    ? typeof value === "string" && value.startsWith(start) && value.length > start.length
    : value === start + id;
}

/** What ends the key in the id of a message. */
const KEY_END = "\u001f";

/** Also for arrays of another realm, such as those of Jest. */
function isBytes(body: unknown): body is Uint8Array {
  return Object.prototype.toString.call(body) === "[object Uint8Array]";
}

/** The body of an answer. */
export function bodyOf(answer: { body?: unknown; body_base64?: string }): unknown {
  if (answer.body_base64 === undefined) return answer.body;
  return Uint8Array.from(atob(answer.body_base64), (char) => char.charCodeAt(0));
}

function base64(bytes: Uint8Array): string {
  let binary = "";
  for (const byte of bytes) binary += String.fromCharCode(byte);
  return btoa(binary);
}

/** Unlike crypto.randomUUID, also works in pages that were not loaded over https. */
function randomId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
