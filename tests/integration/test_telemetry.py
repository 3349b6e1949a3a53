"""OpenTelemetry spans and metrics of real producers and consumers, read from memory."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from lisa import (
    AsyncConsumer,
    AsyncProducer,
    Batch,
    Consumer,
    Defer,
    Discard,
    Message,
    Outgoing,
    Producer,
    Retry,
    TopicFull,
)
from lisa.otel import Telemetry
from lisa.testing import RecordingProducer
from tests.consumers import Bench, ignore, settled
from tests.servers import ROOT, Processes, wait_until

pytestmark = pytest.mark.usefixtures("orders_declared")

TOPIC = "orders"
COMMON = {"messaging.system": "lisa", "messaging.destination.name": TOPIC}
GROUP = {"messaging.consumer.group.name": "lisa"}


class Recorded:
    """What a `Telemetry` reports."""

    def __init__(self, **options: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        meters = MeterProvider([self._reader])
        self.middleware = [
            Telemetry(tracer_provider=self.tracers, meter_provider=meters, **options)
        ]

    def spans(self, operation: str) -> list[ReadableSpan]:
        """The ended spans of an operation, in order."""
        ended = self._exporter.get_finished_spans()
        return [span for span in ended if (span.name or "").startswith(f"{operation} ")]

    def one(self, operation: str) -> ReadableSpan:
        """The only span of an operation."""
        (span,) = self.spans(operation)
        return span

    def points(self, name: str) -> list[Any]:
        """The data points of a metric."""
        data = self._reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def identity(span: ReadableSpan) -> tuple[int, int]:
    found = span.get_span_context()
    assert found is not None
    return found.trace_id, found.span_id


def linked(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(one.context.trace_id, one.context.span_id) for one in span.links]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def handle_all(
    bench: Bench, recorded: Recorded, handler: Callable[[Any], Any], sent: str, **options: Any
) -> None:
    """Run a consumer until a message is acked and all spans of it have ended."""
    consumer = Consumer(bench.url, middleware=recorded.middleware)
    consumer.on(TOPIC, handler, **options)
    with bench.manager(TOPIC), consumer:
        wait_until(settled(bench, sent))


def operation(name: str, kind: str | None = None) -> dict[str, str]:
    """The attributes that name an operation."""
    return {"messaging.operation.name": name, "messaging.operation.type": kind or name}


def test_a_handler_links_to_the_send_and_the_metrics_count_both(
    bench: Bench, recorded: Recorded
) -> None:
    current: list[Any] = []

    def handler(message: Message) -> None:
        current.append(trace.get_current_span().get_span_context())

    web = recorded.tracers.get_tracer("web")
    with (
        Producer(bench.url, middleware=recorded.middleware) as producer,
        web.start_as_current_span("request") as request,
    ):
        sent = producer.send(TOPIC, 1)
    handle_all(bench, recorded, handler, sent)
    send, process, ack = (recorded.one(name) for name in ("send", "process", "ack"))
    assert (send.name, send.kind) == ("send orders", SpanKind.PRODUCER)
    assert (process.name, process.kind) == ("process orders", SpanKind.CONSUMER)
    assert (ack.name, ack.kind) == ("ack orders", SpanKind.CLIENT)
    assert send.parent == request.get_span_context()
    assert (process.parent, ack.parent) == (None, None)
    assert identity(process)[0] != identity(send)[0]
    assert linked(process) == linked(ack) == [identity(send)]
    assert current == [process.get_span_context()]
    the_message = {"messaging.message.id": sent}
    first = {"messaging.lisa.message.delivery_attempt": 1}
    assert attributes(send) == COMMON | operation("send") | the_message
    assert attributes(process) == COMMON | GROUP | operation("process") | the_message | first
    assert attributes(ack) == COMMON | GROUP | operation("ack", "settle")

    with Producer(bench.url, middleware=recorded.middleware) as producer:
        producer.send_many(TOPIC, [2, 3])
        sent = producer.send(TOPIC, 4)
    handle_all(bench, recorded, ignore, sent)

    def total(name: str) -> Any:
        return sum(getattr(one, "count", 0) or one.value for one in recorded.points(name))

    assert total("messaging.client.sent.messages") == 4
    wait_until(lambda: total("messaging.client.consumed.messages") == 4)
    assert total("messaging.process.duration") == 4
    assert total("lisa.message.lateness") == 4
    (late, *_) = recorded.points("lisa.message.lateness")
    assert late.attributes == {"messaging.destination.name": TOPIC} | GROUP
    assert late.min >= 0
    assert late.explicit_bounds[0] == 0.001
    [sends] = [
        point
        for point in recorded.points("messaging.client.operation.duration")
        if point.attributes["messaging.operation.name"] == "send"
    ]
    assert (sends.count, sends.explicit_bounds[0]) == (3, 0.005)
    assert sends.attributes == COMMON | operation("send")


def test_each_attempt_links_to_the_send_and_says_what_failed(
    bench: Bench, recorded: Recorded
) -> None:
    def handler(message: Message) -> object:
        if message.attempt == 1:
            raise ValueError("broken")
        return {2: False, 3: Retry}.get(message.attempt)

    bench.configure(TOPIC, retry_delays="0,0,0")
    with Producer(bench.url, middleware=recorded.middleware) as producer:
        sent = producer.send(TOPIC, 1)
    handle_all(bench, recorded, handler, sent)
    attempts = recorded.spans("process")
    assert [linked(one) for one in attempts] == [[identity(recorded.one("send"))]] * 4
    numbers = [attributes(one)["messaging.lisa.message.delivery_attempt"] for one in attempts]
    assert numbers == [1, 2, 3, 4]
    errors = ["ValueError", "returned_false", "Retry", None]
    assert [attributes(one).get("error.type") for one in attempts] == errors
    failed = attempts[0]
    assert failed.status.status_code is StatusCode.ERROR
    assert [one.name for one in failed.events] == ["exception"]
    assert attempts[2].status.description == "the handler returned Retry"
    assert attempts[3].status.status_code is StatusCode.UNSET
    assert len(recorded.spans("retry")) == 3
    assert len(recorded.points("lisa.message.lateness")) == 1
    (consumed,) = recorded.points("messaging.client.consumed.messages")
    assert (consumed.value, "error.type" in consumed.attributes) == (4, False)
    durations = recorded.points("messaging.process.duration")
    assert {one.attributes.get("error.type") for one in durations} == set(errors)


def test_the_context_survives_a_reclaim_and_parent_makes_one_trace(bench: Bench) -> None:
    recorded = Recorded(parent=True, settle_spans=False)
    bench.configure(TOPIC, ack_timeout="100ms", retry_delays="0,0")
    with Producer(bench.url, middleware=recorded.middleware) as producer:
        sent = producer.send(TOPIC, 1)
    with bench.manager(TOPIC):
        with Consumer(bench.url) as other:  # takes it, and never settles it
            wait_until(lambda: other.pull(TOPIC))
        wait_until(lambda: bench.stat(TOPIC, "reclaimed") == 1)
    bench.configure(TOPIC, ack_timeout="1h")
    handle_all(bench, recorded, ignore, sent)
    send, process = recorded.one("send"), recorded.one("process")
    assert attributes(process)["messaging.lisa.message.delivery_attempt"] == 2
    assert process.parent is not None
    assert (process.parent.trace_id, process.parent.span_id) == identity(send)
    assert linked(process) == [identity(send)]
    assert recorded.spans("ack") == []


def test_a_batch_links_to_each_send(bench: Bench, recorded: Recorded) -> None:
    def handler(batch: Batch) -> None:
        assert trace.get_current_span().is_recording()

    with Producer(bench.url, middleware=recorded.middleware) as producer:
        producer.send_many(TOPIC, [1, 2])
        sent = producer.send(TOPIC, 3)
    handle_all(bench, recorded, handler, sent, batch=3, within="1h")
    many, single = recorded.spans("send")
    assert attributes(many)["messaging.batch.message_count"] == 2
    assert "messaging.message.id" not in attributes(many)
    process = recorded.one("process")
    assert attributes(process)["messaging.batch.message_count"] == 3
    assert linked(process) == [identity(many), identity(many), identity(single)]
    ids = [(one.attributes or {})["messaging.message.id"] for one in process.links]
    assert ids[2] == sent


async def test_async_producers_and_consumers(bench: Bench, recorded: Recorded) -> None:
    seen: list[Any] = []

    async def handler(message: Message) -> None:
        await asyncio.sleep(0)
        seen.append((trace.get_current_span().get_span_context(), baggage.get_baggage("tenant")))

    token = context.attach(baggage.set_baggage("tenant", "a"))
    try:
        async with AsyncProducer(bench.url, middleware=recorded.middleware) as producer:
            ids = await asyncio.gather(*(producer.send(TOPIC, n) for n in range(5)))
    finally:
        context.detach(token)
    web = recorded.tracers.get_tracer("web")
    with web.start_as_current_span("startup"):  # must not become the parent of handlers' spans
        async with AsyncConsumer(bench.url, middleware=recorded.middleware) as consumer:
            consumer.subscribe(TOPIC, handler)
            await consumer.start()
            with bench.manager(TOPIC):
                for sent in ids:
                    await asyncio.to_thread(wait_until, settled(bench, sent))
    processes = recorded.spans("process")
    assert {one.parent for one in processes} == {None}
    sends = {identity(one) for one in recorded.spans("send")}
    assert {link for one in processes for link in linked(one)} == sends
    assert len(sends) == len(processes) == 5
    assert {str(one) for one, _ in seen} == {str(one.get_span_context()) for one in processes}
    assert {tenant for _, tenant in seen} == {"a"}


# Without a server


PARENT = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


def test_a_context_that_the_application_gave_is_kept(recorded: Recorded) -> None:
    producer = RecordingProducer(middleware=recorded.middleware)
    producer.send(TOPIC, 1, headers={"traceparent": PARENT, "a": "b"})
    producer.send_many(TOPIC, [1, Outgoing(2, headers={"traceparent": PARENT})])
    given, made = recorded.spans("send")
    assert producer.sent[0].headers == {"traceparent": PARENT, "a": "b"}
    assert given.kind is SpanKind.CLIENT
    assert linked(given) == [(int("1" * 32, 16), int("2" * 16, 16))]
    assert made.kind is SpanKind.PRODUCER
    assert f"{identity(made)[1]:016x}" in producer.sent[1].headers["traceparent"]
    assert producer.sent[2].headers["traceparent"] == PARENT


def test_a_failed_send_and_a_discarded_message_are_errors(bench: Bench, recorded: Recorded) -> None:
    """A deferred one is none."""

    def handler(message: Message) -> Any:
        if message.body == "raised":
            raise ExceptionGroup("", [Defer(delay="1h")])
        if message.body == "returned":
            return Defer(delay="1h")
        raise Discard("not wanted")

    bench.configure(TOPIC, capacity=1)
    with Producer(bench.url, middleware=recorded.middleware) as producer:
        producer.send(TOPIC, 1, delay="1h")
        with pytest.raises(TopicFull):
            producer.send(TOPIC, 2, delay="1h")
    good, failed = recorded.spans("send")
    assert good.status.status_code is StatusCode.UNSET
    assert failed.status.status_code is StatusCode.ERROR
    assert attributes(failed)["error.type"] == "TopicFull"
    points = recorded.points("messaging.client.sent.messages")
    counted = [(one.value, one.attributes.get("error.type")) for one in points]
    assert counted == [(1, None), (1, "TopicFull")]
    bench.configure(TOPIC, capacity=10)
    sent, *_ = bench.send(TOPIC, [1, "raised", "returned"])  # without a context
    with bench.consumer(handler, middleware=recorded.middleware):
        wait_until(lambda: bench.states(TOPIC, sent) == ["garbage"])
        wait_until(lambda: bench.stat(TOPIC, "deferred") == 2)
    process, *deferred = recorded.spans("process")
    assert (attributes(process)["error.type"], list(process.links)) == ("Discard", [])
    assert process.status.description == "not wanted"
    for span in deferred:
        assert attributes(span)["messaging.lisa.outcome"] == "deferred"
        assert span.status.status_code is StatusCode.UNSET
    points = recorded.points("messaging.process.duration")
    assert {one.attributes.get("error.type") for one in points} == {"Discard", None}


WITHOUT_SDK = """
import sys, time
sys.modules["opentelemetry"] = None
try:
    import lisa.otel
except ImportError as error:
    print(error)
for name in [one for one in sys.modules if one.startswith(("opentelemetry", "lisa.otel"))]:
    del sys.modules[name]
import lisa.otel.telemetry
from lisa.otel import Telemetry
from lisa.testing import RecordingProducer
print(Telemetry().is_idle())
producer = RecordingProducer(middleware=[Telemetry()])
producer.send("orders", 1)
producer.send_many("orders", [1, 2])
print(*(one.headers for one in producer.sent))
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
time.sleep(lisa.otel.telemetry.LOOK_AGAIN_S)
producer.send("orders", 1)
print(*producer.sent[-1].headers)
"""


def test_nothing_is_added_without_an_sdk(processes: Processes) -> None:
    process = processes.start("-c", WITHOUT_SDK, env={"PYTHONPATH": str(ROOT)})
    assert process.wait() == 0, process.output
    *_, said, is_idle, without, later = process.output.splitlines()
    assert said.endswith("opentelemetry is not installed: pip install 'lisa-delay-queue[otel]'")
    assert (is_idle, without, later) == ("True", "{} {} {}", "traceparent")
