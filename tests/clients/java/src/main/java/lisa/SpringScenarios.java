package lisa;

import java.util.LinkedHashMap;
import java.util.Map;
import org.springframework.http.HttpEntity;
import org.springframework.http.HttpHeaders;
import org.springframework.http.MediaType;
import org.springframework.util.LinkedMultiValueMap;
import org.springframework.util.MultiValueMap;
import org.springframework.web.client.RestTemplate;

/** `SpringScenarios SCENARIO URL TOPIC`: calls a gateway with RestTemplate, prints a result. */
final class SpringScenarios {
    private final RestTemplate http = new RestTemplate();
    private final String url;
    private final String topic;

    private SpringScenarios(String url, String topic) {
        this.url = url;
        this.topic = topic;
    }

    public static void main(String[] given) {
        SpringScenarios scenarios = new SpringScenarios(given[1], given[2]);
        switch (given[0]) {
            case "mykit" -> scenarios.mykit();
            case "delay-queue" -> scenarios.delayQueue();
            default -> throw new IllegalArgumentException(given[0]);
        }
    }

    private void mykit() {
        Map<String, Object> found = new LinkedHashMap<>();
        Map<String, Object> job = new LinkedHashMap<>();
        job.put("topic", topic);
        job.put("bizKey", "order-42");
        job.put("delay", 100);
        job.put("ttl", 7);
        job.put("body", "{\"单\": 1}");
        job.put("createTime", System.currentTimeMillis());
        job.put("status", 0);
        found.put("job", job);
        found.put("pushed", http.postForObject(url + "/mykit/push", job, Map.class));
        found.put("got", get("/mykit/get/{topic}?timeout={ms}", topic, 10_000));
        Object id = ((Map<?, ?>) found.get("pushed")).get("data");
        found.put("finished", get("/mykit/finish?jobId={id}", id));
        job.put("delay", 60_000);
        String text = http.postForObject(url + "/mykit/push", job, String.class);
        found.put("pushedAsText", text);
        Object second = ((Map<?, ?>) http.postForObject(url + "/mykit/push", job, Map.class)).get("data");
        found.put("deleted", get("/mykit/delete?jobId={id}", second));
        found.put("unknown", get("/mykit/delete?jobId={id}", "nothing:1"));
        Scenarios.print(found);
    }

    private Map<?, ?> get(String path, Object... values) {
        return http.getForObject(url + path, Map.class, values);
    }

    private void delayQueue() {
        Map<String, Object> found = new LinkedHashMap<>();
        MultiValueMap<String, String> form = new LinkedMultiValueMap<>();
        form.add("topic", topic);
        form.add("delayTime", "2020-01-31 10:00:00");
        form.add("ttrTime", "30");
        form.add("message", "文本 &=+%");
        found.put("pushed", post("push", form));
        found.put("popped", popSome());
        found.put("finished", finish(found.get("popped")));

        // With a value that is not text, Spring sends a multipart form.
        MultiValueMap<String, Object> parts = new LinkedMultiValueMap<>();
        parts.add("topic", topic);
        parts.add("delayTime", System.currentTimeMillis());
        parts.add("ttrTime", 30);
        parts.add("message", "多 parts");
        found.put("pushedParts", post("push", parts));
        found.put("poppedParts", popSome());
        found.put("finishedParts", finish(found.get("poppedParts")));

        HttpHeaders headers = new HttpHeaders();
        headers.setContentType(MediaType.APPLICATION_FORM_URLENCODED);
        form.set("delayTime", String.valueOf(System.currentTimeMillis() + 600_000));
        Map<?, ?> later = post("push", new HttpEntity<>(form, headers));
        found.put("poppedNothing", get("/delay-queue/pop/{topic}", topic));
        found.put("deleted", post("delete?id=" + later.get("id"), null));
        Scenarios.print(found);
    }

    private Map<?, ?> post(String call, Object content) {
        return http.postForObject(url + "/delay-queue/" + call, content, Map.class);
    }

    /** Pops until there is a job, as the consumers of that service do. */
    private Map<?, ?> popSome() {
        Map<?, ?>[] last = new Map<?, ?>[1];
        Scenarios.waitUntil("a job", () -> {
            last[0] = get("/delay-queue/pop/{topic}", topic);
            return last[0].get("data") != null;
        });
        return last[0];
    }

    private Map<?, ?> finish(Object popped) {
        MultiValueMap<String, String> form = new LinkedMultiValueMap<>();
        form.add("id", String.valueOf(((Map<?, ?>) ((Map<?, ?>) popped).get("data")).get("id")));
        return post("finish", form);
    }
}
