package lisa;

import com.alibaba.fastjson.JSONObject;
import java.io.IOException;
import java.net.URLEncoder;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.function.Predicate;
import java.util.stream.Collectors;
import okhttp3.ConnectionPool;
import okhttp3.Dispatcher;
import okhttp3.MediaType;
import okhttp3.OkHttpClient;
import okhttp3.Request;
import okhttp3.RequestBody;
import okhttp3.Response;

/**
 * A client on the HTTP client and JSON parser of camellia's SDK, with that SDK's settings: timeouts
 * of 5 s, for a poll twice its wait; connections kept for 30 s; no repeated calls; a long poll that
 * fails is followed by the next one at once.
 */
final class OkHttpCamellia {
    /** A delayed message, with the fields that the scenarios look at. Times are epoch milliseconds. */
    record Message(
            String id, String text, long triggerTime, long expireTime, int maxRetry, int retry, int status) {}

    /** How a listener pulls. A `pollMs` of 0 means short polls every 20 ms. */
    record Listening(int batch, long ackTimeoutMs, long pollMs) {}

    private static final MediaType FORM = MediaType.parse("application/x-www-form-urlencoded");
    private static final long TIMEOUT_MS = 5_000;

    private final String url;
    private final OkHttpClient http;

    OkHttpCamellia(String url) {
        this.url = url + "/camellia/delayQueue/";
        Dispatcher dispatcher = new Dispatcher();
        dispatcher.setMaxRequests(4096);
        dispatcher.setMaxRequestsPerHost(1024);
        http = within(
                new OkHttpClient.Builder()
                        .dispatcher(dispatcher)
                        .connectionPool(new ConnectionPool(1024, 30, TimeUnit.SECONDS)),
                TIMEOUT_MS);
    }

    private static OkHttpClient within(OkHttpClient.Builder builder, long timeoutMs) {
        return builder.connectTimeout(timeoutMs, TimeUnit.MILLISECONDS)
                .readTimeout(timeoutMs, TimeUnit.MILLISECONDS)
                .writeTimeout(timeoutMs, TimeUnit.MILLISECONDS)
                .build();
    }

    /** Sends a message; a null id lets the server choose one. */
    Message send(String topic, String id, String text, long delayMs, long ttlMs, int maxRetry) {
        Map<String, Object> form = form(topic, id);
        form.put("msg", text);
        form.put("delayMillis", delayMs);
        form.put("ttlMillis", ttlMs);
        form.put("maxRetry", maxRetry);
        return message(expect(call("sendMsg", form), 200).getJSONObject("delayMsg"));
    }

    /** Whether there was a message to delete. */
    boolean delete(String topic, String id) {
        return expect(call("deleteMsg", form(topic, id)), 200, 404).getIntValue("code") == 200;
    }

    /** The message in its present state; null if the server does not know it. */
    Message get(String topic, String id) {
        JSONObject found = expect(call("getMsg", form(topic, id)), 200, 404);
        return found.getIntValue("code") == 200 ? message(found.getJSONObject("delayMsg")) : null;
    }

    /** Handles messages until the program ends; false and exceptions of the handler are nacks. */
    void listen(String topic, Listening how, Predicate<Message> handler) {
        OkHttpClient client = how.pollMs() > 0 ? within(http.newBuilder(), how.pollMs() * 2) : http;
        Map<String, Object> form = form(topic, null);
        form.put("ackTimeoutMillis", how.ackTimeoutMs());
        form.put("batch", how.batch());
        if (how.pollMs() > 0) {
            form.put("longPollingTimeoutMillis", how.pollMs());
        }
        Thread thread = new Thread(() -> pullForEver(client, form, how, handler));
        thread.setDaemon(true);
        thread.start();
    }

    private void pullForEver(
            OkHttpClient client, Map<String, Object> form, Listening how, Predicate<Message> handler) {
        while (true) {
            boolean some = false;
            try {
                some = pull(client, form, how, handler);
            } catch (RuntimeException failed) {
                some = false;
            }
            if (!some && how.pollMs() == 0) {
                Scenarios.sleep(20);
            }
        }
    }

    private boolean pull(
            OkHttpClient client, Map<String, Object> form, Listening how, Predicate<Message> handler) {
        JSONObject answer = call(client, how.pollMs() > 0 ? "longPollingMsg" : "pullMsg", form);
        List<Message> found = answer.getIntValue("code") != 200 || answer.getJSONArray("delayMsgList") == null
                ? List.of()
                : answer.getJSONArray("delayMsgList").stream()
                        .map(one -> message((JSONObject) one))
                        .toList();
        for (Message one : found) {
            Map<String, Object> settled = form(form.get("topic").toString(), one.id());
            settled.put("ack", handled(handler, one));
            try {
                call("ackMsg", settled);
            } catch (RuntimeException lost) {
                continue; // the message is redelivered after its ack timeout
            }
        }
        return !found.isEmpty();
    }

    private static boolean handled(Predicate<Message> handler, Message message) {
        try {
            return handler.test(message);
        } catch (RuntimeException failed) {
            return false;
        }
    }

    private JSONObject call(String name, Map<String, Object> form) {
        return call(http, name, form);
    }

    private JSONObject call(OkHttpClient client, String name, Map<String, Object> form) {
        String content = form.entrySet().stream()
                .map(one -> one.getKey() + "="
                        + URLEncoder.encode(one.getValue().toString(), StandardCharsets.UTF_8))
                .collect(Collectors.joining("&"));
        Request request =
                new Request.Builder().url(url + name).post(RequestBody.create(FORM, content)).build();
        try (Response response = client.newCall(request).execute()) {
            if (response.code() != 200) {
                throw new IllegalStateException("http.code=" + response.code());
            }
            return JSONObject.parseObject(response.body().string());
        } catch (IOException failed) {
            throw new IllegalStateException(failed);
        }
    }

    private static JSONObject expect(JSONObject answer, int... codes) {
        for (int code : codes) {
            if (answer.getIntValue("code") == code) {
                return answer;
            }
        }
        throw new IllegalStateException(answer.toJSONString());
    }

    private static Map<String, Object> form(String topic, String id) {
        Map<String, Object> form = new LinkedHashMap<>();
        form.put("topic", topic);
        if (id != null) {
            form.put("msgId", id);
        }
        return form;
    }

    private static Message message(JSONObject found) {
        return new Message(
                found.getString("msgId"),
                found.getString("msg"),
                found.getLongValue("triggerTime"),
                found.getLongValue("expireTime"),
                found.getIntValue("maxRetry"),
                found.getIntValue("retry"),
                found.getIntValue("status"));
    }
}
