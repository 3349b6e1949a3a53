package lisa;

import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Scanner;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.Supplier;
import java.util.stream.IntStream;
import lisa.OkHttpCamellia.Listening;
import lisa.OkHttpCamellia.Message;

/** `CamelliaScenarios SCENARIO URL TOPIC`: runs one scenario and prints its result as JSON. */
final class CamelliaScenarios {
    private static final int ACKED = 4;

    private final OkHttpCamellia client;
    private final String topic;

    /** The text of each message, with the numbers of its deliveries. */
    private final Map<String, List<Integer>> seen = new ConcurrentHashMap<>();

    private CamelliaScenarios(String url, String topic) {
        client = new OkHttpCamellia(url);
        this.topic = topic;
    }

    public static void main(String[] given) {
        CamelliaScenarios scenarios = new CamelliaScenarios(given[1], given[2]);
        switch (given[0]) {
            case "calls" -> scenarios.calls();
            case "listeners" -> scenarios.listeners();
            case "restart" -> scenarios.restart();
            default -> throw new IllegalArgumentException(given[0]);
        }
    }

    /** The calls of a producer. */
    private void calls() {
        long before = System.currentTimeMillis();
        Map<String, Object> found = new LinkedHashMap<>();
        Message sent = client.send(topic, "mine", "文本 &=+%", 60_000, 5_000, 0);
        found.put("sent", sent);
        found.put("dueIn", sent.triggerTime() - before);
        found.put("sentAgain", client.send(topic, "mine", "other", 1, -1, -1));
        found.put("got", client.get(topic, "mine"));
        found.put("deleted", List.of(client.delete(topic, "mine"), client.delete(topic, "mine")));
        found.put("statusOfDeleted", client.get(topic, "mine").status());
        found.put("unknown", client.get(topic, "nobody"));
        Message plain = client.send(topic, null, "plain", 0, -1, -1);
        found.put("plain", plain);
        found.put("emptyText", error(() -> client.send(topic, null, "", 0, -1, -1)));
        found.put("badTopic", error(() -> client.send("a|b", null, "x", 0, -1, -1)));
        Scenarios.print(found);
    }

    private static String error(Supplier<?> call) {
        try {
            return "no error: " + call.get();
        } catch (RuntimeException failed) {
            return String.valueOf(failed.getMessage());
        }
    }

    /** Several listeners, started before the topic exists; some deliveries fail once or twice. */
    private void listeners() {
        for (long pollMs : new long[] {1_000, 1_000, 0}) {
            client.listen(topic, new Listening(4, 30_000, pollMs), this::failSome);
        }
        List<String> ids = IntStream.range(0, 30)
                .mapToObj(i -> client.send(topic, null, String.valueOf(i), 10L * i, -1, -1).id())
                .toList();
        waitUntilAcked(ids);
        Scenarios.print(Map.of("seen", seen));
    }

    /** Messages 0, 3, 6 and so on are refused once; 1, 4, 7 and so on fail twice. */
    private boolean failSome(Message message) {
        record(message);
        int kind = Integer.parseInt(message.text()) % 3;
        if (kind == 1 && message.retry() < 3) {
            throw new IllegalStateException("this handler fails twice");
        }
        return kind != 0 || message.retry() > 1;
    }

    /**
     * Sends while the server is stopped and started again. Each message has an id, and its send is
     * repeated until it succeeds, as a careful application does.
     */
    private void restart() {
        for (long pollMs : new long[] {2_000, 2_000, 0}) {
            client.listen(topic, new Listening(2, 2_000, pollMs), message -> {
                record(message);
                return true;
            });
        }
        AtomicInteger failures = new AtomicInteger();
        List<String> ids = Collections.synchronizedList(new ArrayList<>());
        Thread producer = new Thread(() -> {
            for (int i = 0; i < 150; i++) {
                ids.add(sendUntilAccepted("message-" + i, failures));
                Scenarios.sleep(10);
            }
        });
        producer.start();
        Scenarios.waitUntil("10 messages handled", () -> seen.size() >= 10);
        Scenarios.print(Map.of("handled", seen.size()));
        new Scanner(System.in, "UTF-8").nextLine(); // the server is up again
        Scenarios.waitUntil("all sent", () -> !producer.isAlive());
        waitUntilAcked(ids);
        Scenarios.print(Map.of("seen", seen, "sent", ids, "failures", failures.get()));
    }

    private String sendUntilAccepted(String id, AtomicInteger failures) {
        while (true) {
            try {
                return client.send(topic, id, id, 50, -1, -1).id();
            } catch (RuntimeException unreachable) {
                failures.incrementAndGet();
                Scenarios.sleep(50);
            }
        }
    }

    private void record(Message message) {
        seen.computeIfAbsent(message.text(), one -> Collections.synchronizedList(new ArrayList<>()))
                .add(message.retry());
    }

    private void waitUntilAcked(List<String> ids) {
        for (String id : ids) {
            Scenarios.waitUntil(id + " acked", () -> client.get(topic, id).status() == ACKED);
        }
    }
}
