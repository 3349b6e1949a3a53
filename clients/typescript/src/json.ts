// JSON without silent changes. JSON.stringify turns NaN, a Set or an invalid Date into null or {},
// and JSON.parse rounds large integers.

import { LisaError } from "./errors.js";

const DEEPEST = 1_000;
const TOKEN = /"[^"\\]*(?:\\.[^"\\]*)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;
/** Nobody can put text that begins with it into a message. */
const BIGINT = `bigint ${crypto.getRandomValues(new Uint32Array(4)).join(" ")} `;

/** The JSON of a value. Throws a LisaError with the path of a part that has none. */
export function encode(value: unknown): string {
  return encodePart(value, "", new Set());
}

/** The value of a JSON text. An integer beyond 2^53 - 1 is a bigint. */
export function parse(text: string): unknown {
  const value: unknown = JSON.parse(text);
  if (!/\d{16}/.test(text)) return value;
  const marked = text.replace(TOKEN, (token) => isLarge(token) ? `"${BIGINT}${token}"` : token);
  return JSON.parse(marked, (_, one: unknown) =>
    typeof one === "string" && one.startsWith(BIGINT) ? BigInt(one.slice(BIGINT.length)) : one);
}

/** Half of a surrogate pair has no UTF-8. */
export function isWellFormed(text: string): boolean {
  return !/\p{Surrogate}/u.test(text);
}

function isLarge(token: string): boolean {
  return /^-?\d{16,}$/.test(token) && !Number.isSafeInteger(Number(token));
}

function encodePart(value: unknown, path: string, around: Set<object>): string {
  switch (typeof value) {
    case "string":
      if (!isWellFormed(value)) throw refusal(path, "text with half of a surrogate pair");
      return JSON.stringify(value);
    case "number":
      if (!Number.isFinite(value)) throw refusal(path, String(value));
      // Larger numbers are written with an exponent, and are not read as integers.
      if (Math.abs(value) > Number.MAX_SAFE_INTEGER && Math.abs(value) < 1e21) {
        throw new LisaError(`${path}: use a bigint for integers beyond 2^53 - 1, such as ${value}`);
      }
      return JSON.stringify(value);
    case "boolean":
    case "bigint":
      return String(value);
    case "object":
      return value === null ? "null" : encodeObject(value, path, around);
    default:
      throw refusal(path, typeof value === "undefined" ? "undefined" : `a ${typeof value}`);
  }
}

function encodeObject(value: object, path: string, around: Set<object>): string {
  if (around.has(value)) throw refusal(path, "a cycle");
  if (around.size === DEEPEST) throw refusal(path, `a value nested ${DEEPEST} deep`);
  around.add(value);
  const text = encodeContent(value, path, around);
  around.delete(value);
  return text;
}

function encodeContent(value: object, path: string, around: Set<object>): string {
  if (Array.isArray(value)) {
    // Array.from also visits holes.
    return `[${Array.from(value, (one, at) => encodePart(one, `${path}[${at}]`, around)).join()}]`;
  }
  const name = nameOf(value);
  if (!ArrayBuffer.isView(value) && "toJSON" in value && typeof value.toJSON === "function") {
    const given: unknown = value.toJSON();
    if (given === null || given === undefined) throw refusal(path, `an invalid ${name}`);
    return encodePart(given, path, around);
  }
  const fields = Object.entries(value).filter(([, one]) => one !== undefined);
  const isPlain = name === "Object";
  // Built-in classes have tags of their own; those of users may keep everything in private fields.
  const isRecord = Object.prototype.toString.call(value) === "[object Object]";
  if (!isRecord || (fields.length === 0 && !isPlain)) throw refusal(path, `an object of ${name}`);
  const parts = fields.map(([key, one]) =>
    `${JSON.stringify(key)}:${encodePart(one, path ? `${path}.${key}` : key, around)}`);
  return `{${parts.join()}}`;
}

function nameOf(value: object): string {
  const constructor: unknown = Object.getPrototypeOf(value)?.constructor ?? Object;
  return typeof constructor === "function" ? constructor.name : "Object";
}

function refusal(path: string, what: string): LisaError {
  return new LisaError(`${path}: ${what} has no JSON form; convert it first`);
}
