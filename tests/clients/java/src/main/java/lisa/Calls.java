package lisa;

import com.alibaba.fastjson.JSON;
import com.fasterxml.jackson.core.type.TypeReference;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.net.URLEncoder;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Scanner;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import okhttp3.ConnectionPool;
import okhttp3.MediaType;
import okhttp3.OkHttpClient;
import okhttp3.Request;
import okhttp3.RequestBody;
import okhttp3.Response;
import org.springframework.http.HttpEntity;
import org.springframework.http.HttpHeaders;
import org.springframework.util.LinkedMultiValueMap;
import org.springframework.util.MultiValueMap;
import org.springframework.web.client.RestTemplate;

/** Makes calls with HTTP clients of Java. Reads a call, and prints its result, as a line of JSON. */
final class Calls {
    record Call(int number, String name, String topic, Map<String, Object> given) {}

    private static final ObjectMapper MAPPER = new ObjectMapper();
    private static final RestTemplate SPRING = new RestTemplate();
    private static final OkHttpClient CAMELLIA = new OkHttpClient.Builder()
            .connectionPool(new ConnectionPool(1024, 30, TimeUnit.SECONDS))
            .build();

    public static void main(String[] arguments) throws IOException {
        Scanner lines = new Scanner(System.in, StandardCharsets.UTF_8);
        while (lines.hasNextLine()) {
            Call call = MAPPER.readValue(lines.nextLine(), new TypeReference<>() {});
            Thread thread = new Thread(() -> print(call));
            thread.setDaemon(true);
            thread.start();
        }
    }

    private static void print(Call call) {
        Map<String, Object> result = new LinkedHashMap<>();
        result.put("number", call.number());
        try {
            result.put("value", perform(call.name(), call.topic(), call.given()));
        } catch (IOException | RuntimeException failed) {
            result.put("error", String.valueOf(failed.getMessage()));
        }
        try {
            System.out.println(MAPPER.writeValueAsString(result));
        } catch (IOException impossible) {
            throw new IllegalStateException(impossible);
        }
    }

    private static Object perform(String name, String url, Map<String, Object> given) throws IOException {
        return switch (name) {
            case "camellia" -> camellia(url, given);
            case "get" -> SPRING.getForObject(url, Map.class, given);
            case "json" -> SPRING.postForObject(url, given, Map.class);
            case "json as text" -> SPRING.postForObject(url, given, String.class);
            // Spring sends a multipart form if a value is not text.
            case "form" -> SPRING.postForObject(url, form(given), Map.class);
            case "declared form" -> SPRING.postForObject(url, declaredForm(given), Map.class);
            case "nothing" -> SPRING.postForObject(url, null, Map.class, given);
            default -> throw new IllegalArgumentException(name);
        };
    }

    private static MultiValueMap<String, Object> form(Map<String, Object> given) {
        MultiValueMap<String, Object> form = new LinkedMultiValueMap<>();
        given.forEach(form::add);
        return form;
    }

    private static HttpEntity<?> declaredForm(Map<String, Object> given) {
        HttpHeaders headers = new HttpHeaders();
        headers.setContentType(org.springframework.http.MediaType.APPLICATION_FORM_URLENCODED);
        return new HttpEntity<>(form(given), headers);
    }

    /** A call with the HTTP client, JSON parser and timeouts of camellia's SDK. */
    private static Object camellia(String url, Map<String, Object> given) throws IOException {
        Object pollMs = given.get("longPollingTimeoutMillis");
        Duration limit = Duration.ofMillis(pollMs == null ? 5_000 : 2 * Long.parseLong(pollMs.toString()));
        OkHttpClient client = CAMELLIA.newBuilder()
                .connectTimeout(limit).readTimeout(limit).writeTimeout(limit).build();
        String content = given.entrySet().stream()
                .map(one -> one.getKey() + "=" + URLEncoder.encode(one.getValue().toString(), StandardCharsets.UTF_8))
                .collect(Collectors.joining("&"));
        RequestBody form = RequestBody.create(MediaType.parse("application/x-www-form-urlencoded"), content);
        try (Response response = client.newCall(new Request.Builder().url(url).post(form).build()).execute()) {
            if (response.code() != 200) {
                throw new IOException("http.code=" + response.code());
            }
            return JSON.parseObject(response.body().string());
        }
    }
}
