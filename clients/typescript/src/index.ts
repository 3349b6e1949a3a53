// Client of Lisa, a delayed-message queue.

export type { OutgoingMessage } from "./bodies.js";
export {
  Client, type CancelOutcome, type Due, type FoundMessage, type KeyDue, type OfGroup,
  type RescheduleOutcome,
} from "./client.js";
export { Delivery } from "./delivery.js";
export {
  DeferError, DiscardError, LisaError, ProblemError, RetryError, UnreachableError,
} from "./errors.js";
export type { CallOptions, ClientOptions } from "./http.js";
export type * from "./schema.js";
export { Worker, type Handler, type WorkerOptions } from "./worker.js";
