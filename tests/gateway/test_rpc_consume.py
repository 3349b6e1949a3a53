"""gRPC: the stream that delivers messages within the client's credit."""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
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
from tests.rpc_client import Stream, address, code
from tests.servers import ROOT, wait_until

STATUS = grpc.StatusCode


@pytest.fixture(scope="module")
def gateway(redis_url: str, manager: Manager) -> Iterator[Gateway]:
    with Gateway(redis_url, "--grpc-port", "0") as running:
        yield running
    assert not [line for line in running.said if "ERROR" in line or "Traceback" in line]


@pytest.fixture(scope="module")
def channel(gateway: Gateway) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address(gateway)) as opened:
        yield opened


def filled(client: httpx.Client, count: int) -> str:
    """A topic with the group lisa and some messages, whose ids are their numbers."""
    topic = new_topic()
    client.post(f"/v1/topics/{topic}/groups", json={"group": "lisa"}).raise_for_status()
    messages = [{"id": str(n), "body": n} for n in range(count)]
    client.post(f"/v1/topics/{topic}/messages:batch", json={"messages": messages})
    return topic


def pulled(client: httpx.Client, topic: str, most: int = 500) -> list[dict[str, Any]]:
    """What another client of the group gets."""
    answer = client.post(f"/v1/topics/{topic}/pull", json={"max": most, "wait_ms": 20_000})
    found: list[dict[str, Any]] = answer.json()["deliveries"]
    return found


def state(client: httpx.Client, topic: str, name: str) -> str:
    found: str = client.get(f"/v1/topics/{topic}/messages/{name}").json()["state"]
    return found


def group_counts(client: httpx.Client, topic: str) -> dict[str, int]:
    found: dict[str, int] = client.get(f"/v1/topics/{topic}").json()["groups"][0]
    return found


def test_deliveries_never_exceed_the_credit(channel: grpc.Channel, client: httpx.Client) -> None:
    topic = filled(client, 10)
    with Stream(channel, topic, credit=3) as stream:
        assert [one.id for one in stream.wait_for(3)] == ["0", "1", "2"]
        assert stream.deliveries[0].body_json == "0"
        # The others are free for anyone else.
        others = pulled(client, topic, 4)
        assert [one["id"] for one in others] == ["3", "4", "5", "6"]
        stream.send(pb.ConsumeRequest(credit=1))
        stream.send(pb.ConsumeRequest(credit=1))
        assert [one.id for one in stream.wait_for(5)] == ["0", "1", "2", "7", "8"]
        assert [one["id"] for one in pulled(client, topic)] == ["9"]
        assert len(stream.deliveries) == 5


def test_deliveries_are_settled_on_the_stream(channel: grpc.Channel, client: httpx.Client) -> None:
    topic = filled(client, 5)
    with Stream(channel, topic, credit=5) as stream:
        acked, retried, extended, released, dead = stream.wait_for(5)
        done = stream.settle(acked, ack={})
        assert (done.receipt, done.outcome, done.HasField("problem")) == (
            acked.receipt,
            "acked",
            False,
        )
        assert stream.settle(acked, ack={}).outcome == "repeated"
        again = stream.settle(retried, retry={"delay_ms": 3_600_000, "reason": "why"})
        assert (again.outcome, again.due_ms > retried.due_ms) == ("retrying", True)
        assert stream.settle(extended, extend={"ack_timeout_ms": 90_000}).outcome == "extended"
        assert stream.settle(released, release={}).outcome == "released"
        assert stream.settle(dead, retry={"discard": True}).outcome == "dead"
        stale = stream.settle(released, extend={})
        assert (stale.outcome, stale.problem.type) == ("failed", "urn:lisa:problem:stale")
        for invalid in ({"retry": {"delay_ms": -1}}, {"extend": {"ack_timeout_ms": 1}}, {}):
            failed = stream.settle(extended, **invalid)
            assert failed.problem.type == "urn:lisa:problem:invalid"
    states = [state(client, topic, one) for one in "0124"]
    assert states == ["acked", "retry", "in_flight", "garbage"]


def test_a_broken_stream_returns_what_was_not_started(
    channel: grpc.Channel, client: httpx.Client
) -> None:
    topic = filled(client, 5)
    with Stream(channel, topic, credit=5) as stream:
        started, acked, extended, *_ = stream.wait_for(5)
        stream.send(pb.ConsumeRequest(started=[started.receipt]))
        stream.settle(acked, ack={})
        stream.settle(extended, extend={})
        stream.cancel()
        found = pulled(client, topic)
        while len(found) < 2:
            found += pulled(client, topic)
    # The stream's ack timeout, ten minutes, is far longer than the pull waits.
    assert [(one["id"], one["attempt"]) for one in found] == [("3", 1), ("4", 1)]
    assert [state(client, topic, one) for one in "012"] == ["in_flight", "acked", "in_flight"]
    path = f"/v1/topics/{topic}/messages/0/ack"
    answer = client.post(path, json={"receipt": started.receipt})
    assert answer.json()["outcome"] == "acked"


def test_what_was_read_before_the_break_is_settled(
    channel: grpc.Channel, client: httpx.Client
) -> None:
    topic = filled(client, 500)

    def acked() -> int:
        found: int = client.get(f"/v1/topics/{topic}").json()["counters"]["acked"]
        return found

    with Stream(channel, topic, credit=500) as stream:
        acks = [pb.Settlement(receipt=one.receipt, ack={}) for one in stream.wait_for(500)]
        stream.send(pb.ConsumeRequest(settlements=acks))
        wait_until(acked)
        stream.cancel()
    wait_until(lambda: acked() == 500)


@pytest.mark.full
def test_a_client_that_neither_sends_nor_reads_is_cut_off(
    redis_url: str, client: httpx.Client, tmp_path: Path
) -> None:
    topic = filled(client, 0)
    for _ in range(20):  # more than the windows of HTTP/2 and the client's buffers take
        body = {"body": "x" * 900_000}
        client.post(f"/v1/topics/{topic}/messages", json=body).raise_for_status()
    config = "lisa-delay-queue: {gateway-server: {request-timeout: 500ms}, grpc: {port: 0}}"
    with (
        Gateway(redis_url, config=config, directory=tmp_path) as gateway,
        grpc.insecure_channel(address(gateway)) as opened,
    ):
        ended = threading.Event()
        method = opened.stream_stream("/lisa.v1.Lisa/Consume", pb.ConsumeRequest.SerializeToString)
        with pytest.raises(grpc.RpcError) as caught:
            next(method(iter(ended.wait, True)))
        assert code(caught.value) is STATUS.DEADLINE_EXCEEDED
        first = pb.ConsumeRequest(open={"topic": topic, "ack_timeout_ms": 600_000}, credit=20)
        unread = method(chain([first], iter(ended.wait, True)))

        wait_until(lambda: group_counts(client, topic)["in_flight"])
        wait_until(lambda: not group_counts(client, topic)["in_flight"])
        assert pulled(client, topic, 1)[0]["attempt"] == 1
        unread.cancel()
        ended.set()


def test_a_client_that_ends_its_requests_gets_all_results(
    channel: grpc.Channel, client: httpx.Client
) -> None:
    topic = filled(client, 51)
    with Stream(channel, topic, credit=51) as stream:
        *some, _ = stream.wait_for(51)
        for one in some:
            ack = pb.Settlement(receipt=one.receipt, ack={})
            stream.send(pb.ConsumeRequest(settlements=[ack]))
        assert stream.finish() is STATUS.OK
        assert [one.outcome for one in stream.settled] == ["acked"] * 50
    assert [(one["id"], one["attempt"]) for one in pulled(client, topic)] == [("50", 1)]


@pytest.mark.full
def test_results_follow_deliveries_that_the_client_has_not_read_yet(
    channel: grpc.Channel, client: httpx.Client
) -> None:
    topic = filled(client, 1)
    requests: queue.Queue[pb.ConsumeRequest | None] = queue.Queue()
    requests.put(pb.ConsumeRequest(open={"topic": topic, "ack_timeout_ms": 600_000}, credit=1))
    answers = LisaStub(channel).Consume(iter(requests.get, None))
    (one,) = next(answers).deliveries
    for _ in range(20):  # more than the windows of HTTP/2 and the client's buffers take
        body = {"body": "x" * 900_000}
        client.post(f"/v1/topics/{topic}/messages", json=body).raise_for_status()
    requests.put(pb.ConsumeRequest(credit=20))
    blocked = [0.0] * 10

    def is_blocked() -> bool:
        page = Exposed(client.get("/metrics").text)
        blocked.append(page.total("lisa_gateway_buffered_bytes"))
        return all(blocked[-10:])

    wait_until(is_blocked)  # other answers take a moment only
    ack = pb.Settlement(receipt=one.receipt, ack={})
    requests.put(pb.ConsumeRequest(settlements=[ack]))
    requests.put(None)
    wait_until(lambda: state(client, topic, "0") == "acked")
    rest = list(answers)
    assert [each.outcome for answer in rest for each in answer.settled] == ["acked"]
    assert answers.code() is STATUS.OK


def test_large_bodies_come_in_several_messages(channel: grpc.Channel, client: httpx.Client) -> None:
    topic = filled(client, 0)
    for _ in range(7):  # more than a client of gRPC takes in one message by default
        body = {"body": "x" * 900_000}
        client.post(f"/v1/topics/{topic}/messages", json=body).raise_for_status()
    with Stream(channel, topic, credit=7) as stream:
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
            wait_until(lambda: stream.status is not None)
            assert stream.status is STATUS.INVALID_ARGUMENT


@pytest.mark.full
def test_an_open_stream_counts_as_a_waiting_pull(redis_url: str, tmp_path: Path) -> None:
    config = "lisa-delay-queue: {gateway-server: {max-polls: 1}, grpc: {port: 0}}"
    with (
        Gateway(redis_url, config=config, directory=tmp_path) as gateway,
        grpc.insecure_channel(address(gateway)) as opened,
    ):
        topic = filled(gateway.client, 1)
        with Stream(opened, topic) as first:  # without credit
            wait_until(lambda: gateway.client.get("/healthz").json()["pulls"] == 1)
            with Stream(opened, topic, credit=1) as second:
                wait_until(lambda: second.status is not None)
                assert second.status is STATUS.UNAVAILABLE
            assert first.finish() is STATUS.OK
        with Stream(opened, topic, credit=1) as third:
            assert len(third.wait_for(1)) == 1


@pytest.mark.full
def test_a_stream_outlasts_an_outage(own_server: EmbeddedServer, tmp_path: Path) -> None:
    config = "lisa-delay-queue: {gateway-server: {patience: 500ms}, grpc: {port: 0}}"
    with (
        Manager(own_server.url),
        Gateway(own_server.url, config=config, directory=tmp_path) as gateway,
        grpc.insecure_channel(address(gateway)) as opened,
    ):
        topic = filled(gateway.client, 1)
        with Stream(opened, topic, credit=5) as stream:
            (one,) = stream.wait_for(1)
            own_server.kill()
            failed = stream.settle(one, ack={})
            assert failed.problem.type == "urn:lisa:problem:server-unavailable"
            own_server.restart()
            topic_path = f"/v1/topics/{topic}/messages"
            wait_until(lambda: gateway.client.post(topic_path, json={"body": 2}).status_code == 201)
            assert len(stream.wait_for(2)) >= 2


def test_the_consumer_of_the_page_handles_a_message(gateway: Gateway, client: httpx.Client) -> None:
    page = (ROOT / "docs" / "how-to" / "grpc.md").read_text()
    (program,) = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    topic = new_topic()
    program = program.replace("localhost:9090", address(gateway)).replace("orders", topic)
    process = subprocess.Popen(
        [sys.executable, "-uc", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with process:
        wait_until(lambda: client.get(f"/v1/topics/{topic}/groups").status_code == 200)
        client.post(f"/v1/topics/{topic}/messages", json={"id": "a", "body": {"order": 42}})
        wait_until(lambda: state(client, topic, "a") == "acked")
        process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == "not paid: {'order': 42}\n"


# Stop ---------------------------------------------------------------------------------------------


def stopping(gateway: Gateway) -> threading.Thread:
    """Stop a gateway in the background."""
    thread = threading.Thread(target=gateway.stop)
    thread.start()
    return thread


def test_a_gateway_that_stops_ends_its_streams(redis_url: str, client: httpx.Client) -> None:
    topic = filled(client, 3)
    with (
        Gateway(redis_url, "--grpc-port", "0") as gateway,
        grpc.insecure_channel(address(gateway)) as opened,
        Stream(opened, topic, credit=3) as stream,
    ):
        watch = health_pb2_grpc.HealthStub(opened).Watch(health_pb2.HealthCheckRequest())
        wait_until(lambda: next(watch).status == health_pb2.HealthCheckResponse.SERVING)
        running, late, _ = stream.wait_for(3)
        stream.send(pb.ConsumeRequest(started=[running.receipt]))
        thread = stopping(gateway)
        wait_until(lambda: stream.is_closing)
        stream.send(pb.ConsumeRequest(started=[late.receipt]))
        assert [one["id"] for one in pulled(client, topic)] == ["2"]
        assert stream.settle(running, ack={}).outcome == "acked"
        assert stream.settle(late, ack={}).outcome == "acked"
        assert stream.finish() is STATUS.UNAVAILABLE
        thread.join(30)
        assert gateway.process.returncode == 0
        assert not [line for line in gateway.said if "ERROR" in line or "Traceback" in line]


@pytest.mark.full
def test_a_stop_does_not_wait_longer_than_grace(
    redis_url: str, client: httpx.Client, tmp_path: Path
) -> None:
    topic = filled(client, 2)
    config = "lisa-delay-queue: {gateway-server: {grace: 2s}, grpc: {port: 0}}"
    with (
        Gateway(redis_url, config=config, directory=tmp_path) as gateway,
        grpc.insecure_channel(address(gateway)) as opened,
        Stream(opened, topic, credit=2) as stream,
    ):
        running, _ = stream.wait_for(2)
        stream.send(pb.ConsumeRequest(started=[running.receipt]))
        assert gateway.stop() == 0
        wait_until(lambda: stream.status is not None)
        assert stream.status is STATUS.UNAVAILABLE
        assert [one["id"] for one in pulled(client, topic)] == ["1"]
        assert state(client, topic, "0") == "in_flight"
