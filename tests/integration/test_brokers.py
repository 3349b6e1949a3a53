"""The programs of docs/how-to/brokers.md, taken from the page, with real brokers."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

import aio_pika
import boto3
import confluent_kafka
import nats
import pytest
from aio_pika.abc import AbstractIncomingMessage
from moto.server import ThreadedMotoServer
from nats.js import JetStreamContext

from lisa import AsyncConsumer, Consumer, Manager, Message, Outgoing, Producer, Retry
from lisa.embedded.server import free_port
from tests import brokers
from tests.consumers import Bench, heard
from tests.proxies import CuttingProxy
from tests.servers import ROOT, connect, wait_until

PAGE = ROOT / "docs" / "how-to" / "brokers.md"
TOPIC = "orders"
RETRY = "100 x 200ms"
T = TypeVar("T")

AMQP = "amqp://guest:guest@localhost:5672/"
KAFKA = "localhost:9092"
NATS = "nats://localhost:4222"
QUEUE = "https://sqs.eu-central-1.amazonaws.com/123456789012/orders.fifo"


class Arrival(NamedTuple):
    """A message in the broker, and when it came there, in epoch milliseconds."""

    id: str | None
    body: Any
    at_ms: float


def program(
    section: str, redis_url: str, replace: Mapping[str, str], number: int = 0
) -> AsyncConsumer | Consumer:
    """The consumer of a section's program, with other words for some of the page's.

    A section's second program, number 1, goes on from the first.
    """
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    code = "\n".join(found[: number + 1])
    for old, new in {"redis://localhost:6379/0": redis_url, **replace}.items():
        assert old in code
        code = code.replace(old, new)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102
    consumer: AsyncConsumer | Consumer = names["consumer"]
    return consumer


def at_work(consumer: AsyncConsumer | Consumer, url: str, story: Callable[[Producer], T]) -> T:
    """What the story returns, while the consumer and a manager run."""

    async def on_a_loop(consumer: AsyncConsumer) -> T:
        async with consumer:
            return await asyncio.to_thread(story, producer)

    with Manager(url), Producer(url) as producer:
        if isinstance(consumer, AsyncConsumer):
            return asyncio.run(on_a_loop(consumer))
        with consumer:
            return story(producer)


def send(producer: Producer, name: str, count: int, within_s: float) -> dict[str, float]:
    """Send messages that become due one after the other; the due times by id, in epoch ms."""
    now_ms = time.time_ns() // 1_000_000
    due = {f"{name}-{n}": now_ms + round(1000 * within_s * n / count) for n in range(count)}
    messages = [Outgoing({"of": one}, id=one, at_ms=at_ms) for one, at_ms in due.items()]
    producer.send_many(TOPIC, messages, retry=RETRY)
    return dict(due)


def cut_again_and_again(
    producer: Producer, bench: Bench, proxy: CuttingProxy, rounds: int, pause_s: float
) -> dict[str, float]:
    """Send while connections are cut, and wait until all is acked; the due times by id."""
    due: dict[str, float] = {}
    for number in range(rounds):
        due |= send(producer, f"order-{number}", 50, 2 * pause_s)
        time.sleep(pause_s)
        with proxy.cutting():  # the confirmation of at least one message is lost
            due |= send(producer, f"cut-{number}", 1, 0)
    wait_until(lambda: bench.stat(TOPIC, "acked") == len(due))
    return due


def check(arrivals: list[Arrival], due: Mapping[str, float]) -> None:
    """Every id arrived, none early, and repeats bear the id of the first."""
    assert {arrival.id for arrival in arrivals} == set(due)
    for arrival in arrivals:
        assert arrival.body == {"of": arrival.id}
        assert arrival.at_ms >= due[str(arrival.id)]


class Broker(NamedTuple):
    """A broker that a program of the page is to reach, and what has arrived in it."""

    replace: Mapping[str, str]
    arrivals: Callable[[], list[Arrival]]


def skip_without(kind: str) -> None:
    if reason := brokers.missing(kind):
        pytest.skip(reason)


CUTS = [
    pytest.param(4, 1.0, id="four cuts"),
    pytest.param(20, 3.0, id="twenty cuts", marks=pytest.mark.full),
]
CLOSES_LATE = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
"""The NATS client leaves a connection to the garbage collector if its handshake is cut."""

KINDS = pytest.mark.parametrize("kind", ["Consumer", "AsyncConsumer"])

# RabbitMQ -----------------------------------------------------------------------------------------


class Queue:
    """The queue `orders`, and what arrives in it; used in a `with` block."""

    def __init__(self, address: str) -> None:
        self.arrivals: list[Arrival] = []
        self._url = f"amqp://guest:guest@{address}/"
        self._declared, self._leaving = Event(), Event()
        self._threads = ThreadPoolExecutor()

    def __enter__(self) -> Self:
        self._ended = self._threads.submit(asyncio.run, self._consume())
        wait_until(lambda: self._declared.is_set() or self._ended.done())
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._ended.result(60)
        self._threads.shutdown()

    async def _consume(self) -> None:
        async with await aio_pika.connect(self._url) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue(TOPIC, durable=True)
            await queue.consume(self._arrived, no_ack=True)
            self._declared.set()
            await asyncio.to_thread(self._leaving.wait)
            await queue.delete(if_unused=False, if_empty=False)

    async def _arrived(self, message: AbstractIncomingMessage) -> None:
        body = json.loads(message.body)
        self.arrivals.append(Arrival(message.message_id, body, time.time() * 1000))


@pytest.fixture(scope="module")
def rabbitmq() -> Iterator[str]:
    skip_without("rabbitmq")
    with brokers.rabbitmq() as address:
        yield address


@pytest.fixture
def rabbitmq_queue(rabbitmq: str) -> Iterator[Broker]:
    with Queue(rabbitmq) as queue:
        yield Broker({AMQP: f"amqp://guest:guest@{rabbitmq}/"}, lambda: queue.arrivals)


@pytest.mark.parametrize(("rounds", "pause_s"), CUTS)
def test_rabbitmq_gets_every_message_although_connections_are_cut(
    rabbitmq: str, redis_url: str, bench: Bench, rounds: int, pause_s: float
) -> None:
    with CuttingProxy(f"amqp://{rabbitmq}") as proxy, Queue(rabbitmq) as queue:
        url = f"amqp://guest:guest@{urlsplit(proxy.url).netloc}/?reconnect_interval=0.2"
        consumer = program("RabbitMQ", redis_url, {AMQP: url})
        due = at_work(
            consumer,
            redis_url,
            lambda producer: cut_again_and_again(producer, bench, proxy, rounds, pause_s),
        )
        wait_until(lambda: len({arrival.id for arrival in queue.arrivals}) == len(due))
    check(queue.arrivals, due)
    assert len(queue.arrivals) > len(due), "RabbitMQ drops no repeats"


@KINDS
def test_a_message_that_no_queue_takes_is_retried(rabbitmq: str, redis_url: str, kind: str) -> None:
    url = f"amqp://guest:guest@{rabbitmq}/"
    consumer = program("RabbitMQ", redis_url, {AMQP: url, "Consumer": kind})
    failures = heard(consumer.message_retrying)

    def story(producer: Producer) -> list[Arrival]:
        send(producer, "order", 1, 0)
        wait_until(lambda: failures)
        with Queue(rabbitmq) as queue:
            wait_until(lambda: queue.arrivals)
        return queue.arrivals

    assert [arrival.id for arrival in at_work(consumer, redis_url, story)] == ["order-0"]
    assert "PublishError" in str(failures[0].reason)


# NATS JetStream -----------------------------------------------------------------------------------


@asynccontextmanager
async def jetstream(address: str) -> AsyncIterator[JetStreamContext]:
    async with await nats.connect(f"nats://{address}") as client:
        yield client.jetstream()


async def add_stream(address: str) -> None:
    async with jetstream(address) as stream:
        await stream.add_stream(name="ORDERS", subjects=[TOPIC])


async def stored(address: str) -> list[Arrival]:
    """What the stream has stored."""
    arrivals: list[Arrival] = []
    async with jetstream(address) as stream:
        count = (await stream.stream_info("ORDERS")).state.messages
        reader = await stream.pull_subscribe(TOPIC, stream="ORDERS")
        while len(arrivals) < count:
            for message in await reader.fetch(min(100, count - len(arrivals))):
                message_id = (message.headers or {}).get("Nats-Msg-Id")
                at_ms = message.metadata.timestamp.timestamp() * 1000
                arrivals.append(Arrival(message_id, json.loads(message.data), at_ms))
                await message.ack()
    return arrivals


@pytest.fixture
def nats_server() -> Iterator[str]:
    skip_without("nats")
    with brokers.nats() as address:
        yield address


@pytest.fixture
def nats_stream(nats_server: str) -> Broker:
    asyncio.run(add_stream(nats_server))
    return Broker({NATS: f"nats://{nats_server}"}, lambda: asyncio.run(stored(nats_server)))


@CLOSES_LATE
@pytest.mark.parametrize(("rounds", "pause_s"), CUTS)
def test_jetstream_stores_every_message_once_although_connections_are_cut(
    nats_server: str, redis_url: str, bench: Bench, rounds: int, pause_s: float
) -> None:
    asyncio.run(add_stream(nats_server))
    with CuttingProxy(f"nats://{nats_server}") as proxy:
        url = f"nats://{urlsplit(proxy.url).netloc}"
        sooner = {"max_reconnect_attempts=-1": "max_reconnect_attempts=-1, reconnect_time_wait=0.2"}
        consumer = program("NATS JetStream", redis_url, {NATS: url, **sooner})
        failures = heard(consumer.message_retrying)
        due = at_work(
            consumer,
            redis_url,
            lambda producer: cut_again_and_again(producer, bench, proxy, rounds, pause_s),
        )
    arrivals = asyncio.run(stored(nats_server))
    check(arrivals, due)
    assert len(arrivals) == len(due)
    assert failures, "nothing was published again"
    gc.collect()  # the warning belongs to this test


@KINDS
def test_a_message_that_no_stream_takes_is_retried(
    nats_server: str, redis_url: str, bench: Bench, kind: str
) -> None:
    url = f"nats://{nats_server}"
    consumer = program("NATS JetStream", redis_url, {NATS: url, "Consumer": kind})
    failures = heard(consumer.message_retrying)

    def story(producer: Producer) -> None:
        send(producer, "order", 1, 0)
        wait_until(lambda: failures)
        asyncio.run(add_stream(nats_server))
        wait_until(lambda: bench.stat(TOPIC, "acked") == 1)

    at_work(consumer, redis_url, story)
    assert [arrival.id for arrival in asyncio.run(stored(nats_server))] == ["order-0"]
    assert "NoStreamResponseError" in str(failures[0].reason)


# Kafka --------------------------------------------------------------------------------------------


@pytest.fixture
def kafka_topic() -> Iterator[Broker]:
    """The mock cluster of the client's library: brokers on loopback, for as long as it lives."""
    with confluent_kafka.Producer(
        {"bootstrap.servers": "mock", "test.mock.num.brokers": 1}
    ) as mock:
        (server,) = mock.list_topics(timeout=60).brokers.values()
        address = f"{server.host}:{server.port}"
        yield Broker({KAFKA: address}, lambda: consumed(address))


def consumed(address: str) -> list[Arrival]:
    """What the topic contains."""
    settings = {"bootstrap.servers": address, "group.id": "test"}
    with confluent_kafka.Consumer(settings) as reader:
        topic = reader.list_topics(TOPIC, timeout=60).topics[TOPIC]
        places = [confluent_kafka.TopicPartition(TOPIC, number, 0) for number in topic.partitions]
        count = sum(reader.get_watermark_offsets(place, timeout=60)[1] for place in places)
        reader.assign(places)
        records = reader.consume(count, timeout=60)
    arrivals = []
    for record in records:
        message_id = dict(record.headers() or ())["message-id"]
        assert isinstance(message_id, bytes)
        _, at_ms = record.timestamp()
        arrivals.append(Arrival(message_id.decode(), json.loads(record.value() or b""), at_ms))
    return arrivals


def test_a_message_that_kafka_does_not_confirm_is_retried(
    kafka_topic: Broker, redis_url: str, bench: Bench
) -> None:
    away = {KAFKA: f"127.0.0.1:{free_port()}", "30_000": "300"}
    consumer = program("Kafka", redis_url, away)
    failures = heard(consumer.message_retrying)

    def story(producer: Producer) -> None:
        send(producer, "order", 1, 0)
        wait_until(lambda: failures)

    at_work(consumer, redis_url, story)
    assert "_MSG_TIMED_OUT" in str(failures[0].reason)
    at_work(
        program("Kafka", redis_url, kafka_topic.replace),
        redis_url,
        lambda _: wait_until(lambda: bench.stat(TOPIC, "acked") == 1),
    )
    assert [arrival.id for arrival in kafka_topic.arrivals()] == ["order-0"]


# SQS ----------------------------------------------------------------------------------------------


@pytest.fixture
def sqs_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    with closing(boto3.client("sqs", region_name="eu-central-1")) as client:
        made = client.create_queue(QueueName="orders.fifo", Attributes={"FifoQueue": "true"})
        url = made["QueueUrl"]
        yield Broker({QUEUE: url}, lambda: received(client, url))
        client.delete_queue(QueueUrl=url)
    server.stop()


def received(client: Any, url: str) -> list[Arrival]:
    """What the queue contains."""
    reply = client.receive_message(QueueUrl=url, AttributeNames=["All"], MaxNumberOfMessages=10)
    arrivals = []
    for message in reply["Messages"]:
        body = json.loads(message["Body"])
        sent_ms = float(message["Attributes"]["SentTimestamp"])
        arrivals.append(Arrival(body["id"], body["body"], sent_ms))
    return arrivals


# Redis Streams ------------------------------------------------------------------------------------


@pytest.fixture
def redis_stream(redis_url: str) -> Iterator[Broker]:
    url = redis_url.removesuffix("/0") + "/1"

    def arrivals() -> list[Arrival]:
        return [
            Arrival(
                fields[b"id"].decode(), json.loads(fields[b"body"]), float(entry.split(b"-")[0])
            )
            for entry, fields in client.xrange("due-orders")
        ]

    with connect(url) as client:
        yield Broker({"redis://localhost:6379/1": url}, arrivals)


# All ----------------------------------------------------------------------------------------------


class Published(NamedTuple):
    """A program of the page, the fixture of its broker, and the copies after two attempts."""

    section: str
    number: int
    broker: str
    copies: int


@pytest.mark.parametrize(
    "case",
    [
        Published("RabbitMQ", 0, "rabbitmq_queue", 2),
        Published("NATS JetStream", 0, "nats_stream", 1),
        Published("Kafka", 0, "kafka_topic", 2),
        Published("SQS", 0, "sqs_queue", 1),
        Published("SQS", 1, "sqs_queue", 1),
        Published("Redis Streams", 0, "redis_stream", 2),
        Published("Redis Streams", 1, "redis_stream", 2),
    ],
    ids=lambda case: f"{case.section} {case.number}",
)
@KINDS
def test_a_message_that_is_published_twice(
    request: pytest.FixtureRequest, redis_url: str, bench: Bench, case: Published, kind: str
) -> None:
    broker: Broker = request.getfixturevalue(case.broker)
    replace = {**broker.replace, "Consumer": kind}
    consumer = program(case.section, redis_url, replace, case.number)

    @consumer.on(TOPIC)
    def fail_once(message: Message) -> None:
        if message.attempt == 1:
            raise Retry("after it was published")

    def story(producer: Producer) -> tuple[str, float]:
        due_ms = time.time_ns() // 1_000_000 + 300
        body = {"order": "Größe"}
        message_id = producer.send(TOPIC, body, key="Kundin ü", at_ms=due_ms, retry=RETRY)
        wait_until(lambda: bench.stat(TOPIC, "acked") == 1)
        return message_id, due_ms

    message_id, due_ms = at_work(consumer, redis_url, story)
    arrivals = broker.arrivals()
    assert [arrival.id for arrival in arrivals] == [message_id] * case.copies
    for arrival in arrivals:
        assert arrival.body == {"order": "Größe"}
        assert arrival.at_ms >= due_ms


TWO_SENDS = {"message.id": 1, 'f"{message.id} {message.token}"': 2}
"""What the page passes as the id, and the copies after two sends under one id."""


@pytest.mark.parametrize(
    ("section", "name"), [("NATS JetStream", "nats_stream"), ("SQS", "sqs_queue")]
)
@pytest.mark.parametrize("passed", TWO_SENDS)
def test_two_sends_under_one_id(
    request: pytest.FixtureRequest, redis_url: str, section: str, name: str, passed: str
) -> None:
    assert f"`{passed}`" in PAGE.read_text(encoding="utf-8")
    broker: Broker = request.getfixturevalue(name)
    bench = Bench(redis_url)
    bench.declare(TOPIC, retention=0)

    def story(producer: Producer) -> None:
        producer.send(TOPIC, {}, id="order-42")
        wait_until(lambda: bench.stat(TOPIC, "acked") == 1)
        producer.send(TOPIC, {}, id="order-42")
        wait_until(lambda: bench.stat(TOPIC, "acked") == 2)

    at_work(program(section, redis_url, {**broker.replace, "message.id": passed}), redis_url, story)
    assert len(broker.arrivals()) == TWO_SENDS[passed]
