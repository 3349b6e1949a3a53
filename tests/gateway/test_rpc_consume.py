"""gRPC: the stream that delivers messages within the client's credit."""

import json
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lisa import Manager
from lisa.embedded import EmbeddedServer
from lisa.gateway.rpc import lisa_pb2 as pb
from lisa.gateway.rpc.lisa_pb2_grpc import LisaStub
from tests.exposition import Exposed
from tests.gateways import Gateway, new_topic
from tests.rpc_client import TIMEOUT_S, Stream, address, code
from tests.servers import ROOT, wait_until

STATUS = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def gateway(redis_url: str, manager: Manager) -> Iterator[Gateway]:
    with Gateway(redis_url, "--grpc-port", "0") as running:
        yield running
    assert not [line for line in running.said if "ERROR" in line or "Traceback" in line]


@pytest.fixture(scope="module")
def channel(gateway: Gateway) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address(gateway)) as opened:
        yield opened


class Topic:
    """A topic with the group lisa and some messages, whose ids are their numbers."""

    def __init__(self, client: httpx.Client, count: int = 0) -> None:
        self.name = new_topic()
        self.path = f"/v1/topics/{self.name}"
        self._client = client
        self.post("/groups", group="lisa")
        if count:
            self.post("/messages:batch", messages=[{"id": str(n), "body": n} for n in range(count)])

    def post(self, path: str, **content: Any) -> Any:
        answer = self._client.post(self.path + path, json=content)
        answer.raise_for_status()
        return answer.json()

    def send_large(self, count: int) -> None:
        """Send messages that together exceed the windows of HTTP/2 and the client's buffers."""
        for _ in range(count):
            self.post("/messages", body="x" * 900_000)

    def pulled(self, most: int = 500) -> list[tuple[str, int]]:
        """The ids and attempts that another client of the group gets."""
        found = self.post("/pull", max=most, wait_ms=20_000)["deliveries"]
        return [(delivery["id"], delivery["attempt"]) for delivery in found]

    def state(self, message_id: str) -> str:
        found: str = self._client.get(f"{self.path}/messages/{message_id}").json()["state"]
        return found

    def in_flight(self) -> int:
        found: int = self._client.get(self.path).json()["groups"][0]["in_flight"]
        return found


def ack(delivery: Any) -> pb.ConsumeRequest:
    return pb.ConsumeRequest(settlements=[pb.Settlement(receipt=delivery.receipt, ack={})])


def started(delivery: Any) -> pb.ConsumeRequest:
    return pb.ConsumeRequest(started=[delivery.receipt])


@contextmanager
def own_gateway(redis_url: str, **server: str) -> Iterator[tuple[Gateway, grpc.Channel]]:
    """A gateway with settings of its own, and a channel to it."""
    settings = {"grpc": {"port": 0}, "gateway-server": server}
    config = json.dumps({"lisa-delay-queue": settings})
    with (
        Gateway(redis_url, config=config) as running,
        grpc.insecure_channel(address(running)) as opened,
    ):
        yield running, opened


def test_deliveries_never_exceed_the_credit(channel: grpc.Channel, client: httpx.Client) -> None:
    topic = Topic(client, 10)
    with Stream(channel, topic.name, credit=3) as stream:
        assert [one.id for one in stream.wait_for(3)] == ["0", "1", "2"]
        assert stream.deliveries[0].body_json == "0"
        # The others are free for anyone else.
        assert topic.pulled(4) == [("3", 1), ("4", 1), ("5", 1), ("6", 1)]
        stream.send(pb.ConsumeRequest(credit=1))
        stream.send(pb.ConsumeRequest(credit=1))
        assert [one.id for one in stream.wait_for(5)] == ["0", "1", "2", "7", "8"]
        assert topic.pulled() == [("9", 1)]
        assert len(stream.deliveries) == 5


def test_deliveries_are_settled_on_the_stream(channel: grpc.Channel, client: httpx.Client) -> None:
    topic = Topic(client, 7)
    with Stream(channel, topic.name, credit=7) as stream:
        acked, retried, extended, released, dead, deferred, limited = stream.wait_for(7)
        done = stream.settle(acked, ack={})
        assert (done.receipt, done.outcome) == (acked.receipt, "acked")
        assert not done.HasField("problem")
        assert stream.settle(acked, ack={}).outcome == "repeated"
        again = stream.settle(retried, retry={"delay_ms": 3_600_000, "reason": "why"})
        assert (again.outcome, again.due_ms > retried.due_ms) == ("retrying", True)
        later = stream.settle(deferred, defer={"delay_ms": 3_600_000, "reason": "busy"})
        assert (later.outcome, later.due_ms > deferred.due_ms) == ("deferred", True)
        rests = stream.settle(limited, defer={"delay_ms": 3_600_000, "rests_lane": True})
        assert rests.outcome == "deferred"
        assert stream.settle(extended, extend={"ack_timeout_ms": 90_000}).outcome == "extended"
        assert stream.settle(released, release={}).outcome == "released"
        assert stream.settle(dead, retry={"discard": True}).outcome == "dead"
        stale = stream.settle(released, extend={})
        assert (stale.outcome, stale.problem.type) == ("failed", "urn:lisa:problem:stale")
        extends: dict[str, Any] = {"extend": {"ack_timeout_ms": 1}}
        invalids: list[dict[str, Any]] = [{"retry": {"delay_ms": -1}}, {"defer": {}}, extends, {}]
        for invalid in invalids:
            failed = stream.settle(extended, **invalid)
            assert failed.problem.type == "urn:lisa:problem:invalid"
    states = ["acked", "retry", "in_flight", "garbage", "retry", "parked"]
    assert [topic.state(one) for one in "012456"] == states


def test_a_broken_stream_returns_what_was_not_started(
    channel: grpc.Channel, client: httpx.Client
) -> None:
    topic = Topic(client, 5)
    with Stream(channel, topic.name, credit=5) as stream:
        running, acked, extended, *_ = stream.wait_for(5)
        stream.send(started(running))
        stream.settle(acked, ack={})
        stream.settle(extended, extend={})
        stream.cancel()
        found = topic.pulled()
        while len(found) < 2:
            found += topic.pulled()
    # The stream's ack timeout, ten minutes, is far longer than the pull waits.
    assert found == [("3", 1), ("4", 1)]
    assert [topic.state(one) for one in "012"] == ["in_flight", "acked", "in_flight"]
    assert topic.post("/messages/0/ack", receipt=running.receipt)["outcome"] == "acked"


def test_what_was_read_before_the_break_is_settled(
    channel: grpc.Channel, client: httpx.Client
) -> None:
    topic = Topic(client, 500)

    def acked() -> int:
        found: int = client.get(topic.path).json()["counters"]["acked"]
        return found

    with Stream(channel, topic.name, credit=500) as stream:
        acks = [pb.Settlement(receipt=one.receipt, ack={}) for one in stream.wait_for(500)]
        stream.send(pb.ConsumeRequest(settlements=acks))
        wait_until(acked)
        stream.cancel()
    wait_until(lambda: acked() == 500)


@pytest.mark.full
def test_a_client_that_neither_sends_nor_reads_is_cut_off(
    redis_url: str, client: httpx.Client
) -> None:
    topic = Topic(client)
    topic.send_large(20)
    limits = {"request-timeout": "500ms"}
    with own_gateway(redis_url, **limits) as (_, opened):
        ended = threading.Event()
        method = opened.stream_stream("/lisa.v1.Lisa/Consume", pb.ConsumeRequest.SerializeToString)
        with pytest.raises(grpc.RpcError) as caught:
            next(method(iter(ended.wait, True)))
        assert code(caught.value) is STATUS.DEADLINE_EXCEEDED
        first = pb.ConsumeRequest(open={"topic": topic.name, "ack_timeout_ms": 600_000}, credit=20)
        unread = method(chain([first], iter(ended.wait, True)))
        wait_until(topic.in_flight)
        wait_until(lambda: not topic.in_flight())
        assert topic.pulled(1)[0][1] == 1
        unread.cancel()
        ended.set()


def test_a_client_that_ends_its_requests_gets_all_results(
    channel: grpc.Channel, client: httpx.Client
) -> None:
    topic = Topic(client, 51)
    with Stream(channel, topic.name, credit=51) as stream:
        for delivery in stream.wait_for(51)[:50]:
            stream.send(ack(delivery))
        assert stream.finish() is STATUS.OK
        assert [one.outcome for one in stream.settled] == ["acked"] * 50
    assert topic.pulled() == [("50", 1)]


@pytest.mark.full
def test_results_follow_deliveries_that_the_client_has_not_read_yet(
    channel: grpc.Channel, client: httpx.Client
) -> None:
    topic = Topic(client, 1)
    requests: queue.Queue[pb.ConsumeRequest | None] = queue.Queue()
    opened = {"topic": topic.name, "ack_timeout_ms": 600_000}
    requests.put(pb.ConsumeRequest(open=opened, credit=1))
    answers = LisaStub(channel).Consume(iter(requests.get, None))
    (delivery,) = next(answers).deliveries
    topic.send_large(20)
    requests.put(pb.ConsumeRequest(credit=20))
    blocked = [0.0] * 10

    def is_blocked() -> bool:
        page = Exposed(client.get("/metrics").text)
        blocked.append(page.total("lisa_gateway_buffered_bytes"))
        return all(blocked[-10:])

    wait_until(is_blocked)  # other answers take a moment only
    requests.put(ack(delivery))
    requests.put(None)
    wait_until(lambda: topic.state("0") == "acked")
    rest = list(answers)
    assert [each.outcome for answer in rest for each in answer.settled] == ["acked"]
    assert answers.code() is STATUS.OK


def test_large_bodies_come_in_several_messages(channel: grpc.Channel, client: httpx.Client) -> None:
    topic = Topic(client)
    topic.send_large(7)  # more than a client of gRPC takes in one message by default
    with Stream(channel, topic.name, credit=7) as stream:
        assert len(stream.wait_for(7)) == 7
        assert stream.status is None


def test_streams_that_cannot_open(channel: grpc.Channel) -> None:
    requests = (
        pb.ConsumeRequest(credit=1),
        pb.ConsumeRequest(open={"topic": "no spaces"}),
        pb.ConsumeRequest(open={"topic": "t", "ack_timeout_ms": 1}),
        pb.ConsumeRequest(open={"topic": "t", "group": "no spaces"}),
    )
    for first in requests:
        with Stream(channel, "", first=first) as stream:
            assert stream.wait_for_end() is STATUS.INVALID_ARGUMENT


@pytest.mark.full
def test_an_open_stream_counts_as_a_waiting_pull(redis_url: str) -> None:
    with own_gateway(redis_url, **{"max-polls": "1"}) as (gateway, opened):
        topic = Topic(gateway.client, 1).name
        with Stream(opened, topic) as first:  # without credit
            wait_until(lambda: gateway.client.get("/healthz").json()["pulls"] == 1)
            with Stream(opened, topic, credit=1) as second:
                assert second.wait_for_end() is STATUS.UNAVAILABLE
            assert first.finish() is STATUS.OK
        with Stream(opened, topic, credit=1) as third:
            assert len(third.wait_for(1)) == 1


@pytest.mark.full
def test_a_stream_and_the_health_service_outlast_an_outage(own_server: EmbeddedServer) -> None:
    with (
        Manager(own_server.url),
        own_gateway(own_server.url, patience="500ms") as (gateway, opened),
    ):
        health = health_pb2_grpc.HealthStub(opened)

        def status() -> Any:
            request = health_pb2.HealthCheckRequest(service="lisa.v1.Lisa")
            return health.Check(request, wait_for_ready=True, timeout=TIMEOUT_S).status

        topic = Topic(gateway.client, 1)
        with Stream(opened, topic.name, credit=5) as stream:
            (delivery,) = stream.wait_for(1)
            wait_until(lambda: status() == SERVING)
            own_server.kill()
            failed = stream.settle(delivery, ack={})
            assert failed.problem.type == "urn:lisa:problem:server-unavailable"
            wait_until(lambda: status() == health_pb2.HealthCheckResponse.NOT_SERVING)
            own_server.restart()
            path = f"{topic.path}/messages"
            wait_until(lambda: gateway.client.post(path, json={"body": 2}).status_code == 201)
            assert len(stream.wait_for(2)) >= 2
            wait_until(lambda: status() == SERVING)


def test_the_consumer_of_the_page_handles_a_message(gateway: Gateway, client: httpx.Client) -> None:
    page = (ROOT / "docs" / "how-to" / "grpc.md").read_text()
    (program,) = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    topic = Topic(client)
    program = program.replace("localhost:9090", address(gateway)).replace("orders", topic.name)
    command = [sys.executable, "-uc", program.replace('"mail"', '"lisa"')]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            topic.post("/messages", id="a", body={"order": 42})
            wait_until(lambda: topic.state("a") == "acked")
        finally:
            process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == "not paid: {'order': 42}\n"


# Stop ---------------------------------------------------------------------------------------------


def test_a_gateway_that_stops_ends_its_streams(redis_url: str, client: httpx.Client) -> None:
    topic = Topic(client, 3)
    with (
        own_gateway(redis_url) as (gateway, opened),
        Stream(opened, topic.name, credit=3) as stream,
    ):
        watch = health_pb2_grpc.HealthStub(opened).Watch(health_pb2.HealthCheckRequest())
        wait_until(lambda: next(watch).status == SERVING)
        running, late, _ = stream.wait_for(3)
        stream.send(started(running))
        thread = threading.Thread(target=gateway.stop)
        thread.start()
        wait_until(lambda: stream.is_closing)
        stream.send(started(late))
        assert topic.pulled() == [("2", 1)]
        assert stream.settle(running, ack={}).outcome == "acked"
        assert stream.settle(late, ack={}).outcome == "acked"
        assert stream.finish() is STATUS.UNAVAILABLE
        thread.join(30)
        assert gateway.process.returncode == 0
        assert not [line for line in gateway.said if "ERROR" in line or "Traceback" in line]


@pytest.mark.full
def test_a_stop_does_not_wait_longer_than_grace(redis_url: str, client: httpx.Client) -> None:
    topic = Topic(client, 2)
    with (
        own_gateway(redis_url, grace="2s") as (gateway, opened),
        Stream(opened, topic.name, credit=2) as stream,
    ):
        running, _ = stream.wait_for(2)
        stream.send(started(running))
        assert gateway.stop() == 0
        assert stream.wait_for_end() is STATUS.UNAVAILABLE
        assert topic.pulled() == [("1", 1)]
        assert topic.state("0") == "in_flight"
