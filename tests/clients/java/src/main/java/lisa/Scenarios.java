package lisa;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.util.Map;
import java.util.function.BooleanSupplier;

/** What the programs share. */
final class Scenarios {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final long PATIENCE_MS = 60_000;

    private Scenarios() {}

    /** Prints one line of JSON, which the test reads. */
    static void print(Map<String, ?> found) {
        try {
            System.out.println(JSON.writeValueAsString(found));
            System.out.flush();
        } catch (JsonProcessingException impossible) {
            throw new IllegalStateException(impossible);
        }
    }

    static void sleep(long ms) {
        try {
            Thread.sleep(ms);
        } catch (InterruptedException ended) {
            throw new IllegalStateException(ended);
        }
    }

    /** Returns once the condition holds; fails after a minute. */
    static void waitUntil(String what, BooleanSupplier condition) {
        long deadline = System.nanoTime() + PATIENCE_MS * 1_000_000;
        while (!condition.getAsBoolean()) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException("not within a minute: " + what);
            }
            sleep(10);
        }
    }
}
