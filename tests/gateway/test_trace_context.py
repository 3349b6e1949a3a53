"""Trace context passes through the gateway: from requests into messages, and on into pushes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lisa import Consumer, Producer
from lisa.gateway.trace_context import trace_context, with_trace
from lisa.otel import Telemetry
from tests.gateway.push_targets import Target
from tests.gateways import Gateway, new_topic
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import httpx

    from lisa import Manager, Message

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
OTHER = f"00-{'1' * 32}-{SPAN}-01"
REQUEST = {"traceparent": PARENT, "tracestate": "vendor=1"}


def headers_of(redis_url: str, topic: str, message_id: str) -> dict[str, str]:
    with Producer(redis_url) as producer:
        found = producer.get(topic, message_id)
    assert found is not None
    return found.headers


def test_a_send_takes_the_context_of_its_request(client: httpx.Client, redis_url: str) -> None:
    topic, body = new_topic(), {"body": 1, "delay_ms": 60_000}
    path = f"/v1/topics/{topic}/messages"
    client.post(path, json={**body, "id": "a", "headers": {"x": "y"}}, headers=REQUEST)
    client.post(path, json={**body, "id": "b", "headers": {"traceparent": OTHER}}, headers=REQUEST)
    client.post(path, json={**body, "id": "c"})
    batch = {"messages": [{**body, "id": "d"}, {**body, "id": "e", "headers": {"x": "y"}}]}
    client.post(f"{path}:batch", json=batch, headers=REQUEST)
    assert headers_of(redis_url, topic, "a") == {"x": "y", **REQUEST}
    assert headers_of(redis_url, topic, "b") == {"traceparent": OTHER}
    assert headers_of(redis_url, topic, "c") == {}
    assert headers_of(redis_url, topic, "d") == REQUEST
    assert headers_of(redis_url, topic, "e") == {"x": "y", **REQUEST}


def test_a_handler_links_to_the_http_client_and_a_pull_shows_the_context(
    client: httpx.Client, redis_url: str
) -> None:
    handled, pulled = new_topic(), new_topic()
    exporter, tracers, seen = InMemorySpanExporter(), TracerProvider(), []
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(tracer_provider=tracers, settle_spans=False)
    with Consumer(redis_url, middleware=[telemetry]) as consumer:

        def handler(message: Message) -> None:
            seen.append(message.id)

        consumer.subscribe(handled, handler)
        consumer.start()
        for topic in (handled, pulled):
            client.post(f"/v1/topics/{topic}/messages", json={"body": 1}, headers=REQUEST)
        wait_until(lambda: seen)
    (span,) = exporter.get_finished_spans()
    (link,) = span.links
    assert (f"{link.context.trace_id:x}", f"{link.context.span_id:x}") == (TRACE.lstrip("0"), SPAN)
    assert link.context.trace_state.to_header() == "vendor=1"
    answer: Any = client.post(f"/v1/topics/{pulled}/pull", json={"wait_ms": 20_000}).json()
    assert answer["deliveries"][0]["headers"] == REQUEST


def test_sends_through_the_compatible_apis_take_the_context(
    client: httpx.Client, redis_url: str
) -> None:
    topic, later = new_topic(), str(60_000 + time.time_ns() // 1_000_000)

    def sent(path: str, id_of: Callable[[Any], str], **request: Any) -> dict[str, str]:
        answer = client.post(path, headers=REQUEST, **request)
        return headers_of(redis_url, topic, id_of(answer.json()))

    camellia = sent(
        "/camellia/delayQueue/sendMsg",
        lambda answer: answer["delayMsg"]["msgId"],
        data={"topic": topic, "msg": "m", "delayMillis": 60_000},
    )
    mykit = sent(
        "/mykit/push",
        lambda answer: answer["data"],
        json={"topic": topic, "delay": 60_000, "body": "m"},
    )
    delay_queue = sent(
        "/delay-queue/push",
        lambda answer: answer["id"],
        data={"topic": topic, "delayTime": later, "ttrTime": 60, "message": "m"},
    )
    for found, mark in ((camellia, "camellia"), (mykit, "mykit-delay"), (delay_queue, "ttrTime")):
        assert found.items() >= REQUEST.items()
        assert mark in found


CONFIG = 'lisa-delay-queue: {gateway-server: {push-allow: ["127.0.0.0/8"]}}\n'


def test_a_push_carries_the_context(redis_url: str, manager: Manager, tmp_path: Path) -> None:
    topic = new_topic("push")
    with (
        Gateway(redis_url, config=CONFIG, directory=tmp_path) as pusher,
        Target() as target,
        Producer(redis_url) as producer,
    ):
        pusher.client.put(f"/v1/topics/{topic}/push", json={"url": target.url})
        producer.send(topic, 1, headers={**REQUEST, "x": "y"})
        producer.send(topic, 2)
        wait_until(lambda: len(target.received) == 2)
        pusher.client.delete(f"/v1/topics/{topic}/push")
    with_context, without = sorted(target.received, key=lambda one: one.body)
    assert {name: with_context.headers.get(name) for name in REQUEST} == REQUEST
    assert with_context.headers["lisa-header-x"] == "y"
    assert "traceparent" not in without.headers


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({}, {}),
        ({"tracestate": "a=1"}, {}),
        ({"traceparent": PARENT}, {"traceparent": PARENT}),
        ({"traceparent": PARENT, "tracestate": "a=1\n"}, {"traceparent": PARENT}),
        ({"traceparent": PARENT, "tracestate": "a" * 513}, {"traceparent": PARENT}),
        ({"traceparent": f"ff{PARENT[2:]}"}, {}),
        ({"traceparent": f"{PARENT}\n"}, {}),
        ({"traceparent": PARENT[:-1]}, {}),
        ({"traceparent": f"01{PARENT[2:]}-more"}, {"traceparent": f"01{PARENT[2:]}-more"}),
    ],
)
def test_only_valid_context_passes(headers: dict[str, str], found: dict[str, str]) -> None:
    assert trace_context(headers) == found


def test_headers_without_context_stay_as_they_are() -> None:
    own = {"a": "b"}
    assert with_trace(own, {}) is own
    assert with_trace(None, {}) is None
