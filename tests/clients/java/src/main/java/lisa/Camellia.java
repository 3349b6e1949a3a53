package lisa;

import java.util.function.Predicate;

/** The calls of a client of camellia's delay queue that the scenarios use. */
interface Camellia {
    /** A delayed message, with the fields that the scenarios look at. Times are epoch milliseconds. */
    record Message(
            String id, String text, long triggerTime, long expireTime, int maxRetry, int retry, int status) {}

    /** How a listener pulls. A `pollMs` of 0 means short polls every 20 ms. */
    record Listening(int threads, int batch, long ackTimeoutMs, long pollMs) {}

    /** Sends a message; a null id lets the server choose one. */
    Message send(String topic, String id, String text, long delayMs, long ttlMs, int maxRetry);

    /** Whether there was a message to delete. */
    boolean delete(String topic, String id);

    /** The message in its present state; null if the server does not know it. */
    Message get(String topic, String id);

    /** Handles messages until the program ends; false and exceptions of the handler are nacks. */
    void listen(String topic, Listening how, Predicate<Message> handler);
}
