// Message bodies: JSON values, or bytes in base64.

import { LisaError } from "./errors.js";
import type { SendRequest } from "./schema.js";

/** A message to send: due now, or according to either `delay_ms` or `due_ms`. */
export interface OutgoingMessage extends Omit<SendRequest, "body" | "body_base64"> {
  /** Any JSON value, with a bigint for an integer beyond 2^53 - 1; or bytes. */
  body: unknown;
}

/** The message as the API expects it. A generated id makes it safe to repeat the call. */
export function requestOf(
  { body, id, ...fields }: OutgoingMessage,
): SendRequest & { id: string } {
  const request = { ...fields, id: id ?? randomId() };
  if (body === undefined) throw new LisaError("body must not be undefined; send null instead");
  return isBytes(body) ? { ...request, body_base64: base64(body) } : { ...request, body };
}

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
