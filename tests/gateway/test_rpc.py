"""gRPC: every operation of the HTTP API as a method, errors, access, TLS and standard services."""

import queue
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_tools import protoc

from lisa import Manager
from lisa.gateway.api import OPERATIONS
from lisa.gateway.rpc import lisa_pb2 as pb
from lisa.gateway.rpc.lisa_pb2_grpc import LisaStub
from lisa.gateway.rpc.server import CONSUME, SERVICE, method_of
from tests import certificates
from tests.gateways import NO_TLS, Gateway, new_topic
from tests.rpc_client import TIMEOUT_S, Metadata, Rpc, Stream, address, code, problem, request
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


@pytest.fixture(scope="module")
def rpc(channel: grpc.Channel) -> Rpc:
    return Rpc(channel)


@pytest.fixture
def topic(rpc: Rpc) -> str:
    """A new topic with the group `g`."""
    name = new_topic()
    assert rpc("AddGroup", topic=name, group="g").new
    return name


# The description ----------------------------------------------------------------------------------


def names_of(struct: type[msgspec.Struct] | None) -> set[str]:
    return set(getattr(struct, "__struct_fields__", ()))


def renamed(names: set[str]) -> set[str]:
    """Names of JSON members as those of Protobuf fields."""
    others = {"body": "body_json", "body_base64": "body_bytes"}
    return {others.get(one, one) for one in names}


def fields(message: Any) -> set[str]:
    """The fields of a message; those of a single message stand in `message`."""
    names = {field.name for field in message.fields} - {"message"}
    inner = message.fields_by_name.get("message")
    return names | (fields(inner.message_type) if inner else set())


def test_every_operation_is_a_method_with_its_fields() -> None:
    assert set(SERVICE.methods_by_name) - {CONSUME} == {method_of(one) for one in OPERATIONS}
    for operation in OPERATIONS:
        method = SERVICE.methods_by_name[method_of(operation)]
        assert method.server_streaming is (operation.media_type != "application/json")
        given = names_of(operation.query) | names_of(operation.body) | set(operation.parameters)
        returned = names_of(operation.reply)
        if operation.name == "setOptions":
            given = {"topic", "options", "reset", "group"}
        if operation.name in ("getOptions", "setOptions"):
            returned = {"options"}
        assert fields(method.input_type) == renamed(given), operation.name
        assert fields(method.output_type) == renamed(returned), operation.name


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    file, found = "lisa/gateway/rpc/lisa.proto", FileDescriptorSet()
    out = tmp_path / "descriptors"
    assert protoc.main(["protoc", f"-I{ROOT}", f"--descriptor_set_out={out}", file]) == 0
    found.ParseFromString(out.read_bytes())
    (compiled,) = found.file
    for message in compiled.message_type:
        for field in (*message.field, *(one for each in message.nested_type for one in each.field)):
            field.ClearField("json_name")
    generated = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(generated)
    assert generated == compiled, "run make proto"


# Operations ---------------------------------------------------------------------------------------


LATER = {"delay_ms": 3_600_000}


def test_a_message_from_its_send_to_its_ack(rpc: Rpc, topic: str) -> None:
    def pull(**wanted: Any) -> Any:
        (found,) = rpc("Pull", topic=topic, wait_ms=10_000, **wanted).deliveries
        return found

    big = "123456789012345678901234567890"
    parent = ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    message = {"id": "a", "body_json": f' {{"n": {big}}} ', "headers": {"h": "v"}, "retry": "0"}
    message["late"] = "skip after 10m"
    sent = rpc("SendMessage", topic=topic, message=message, metadata=[parent])
    assert (sent.id, sent.outcome) == ("a", "accepted")
    first = pull(ack_timeout_ms=60_000)
    assert (first.id, first.attempt) == ("a", 1)
    assert dict(first.headers) == dict([("h", "v"), parent])
    assert first.body_json == f'{{"n":{big}}}'
    found = rpc("GetMessage", topic=topic, id="a")
    assert (found.state, found.groups["g"].state) == ("in_flight", "in_flight")
    held = {"topic": topic, "id": "a", "receipt": first.receipt}
    assert rpc("ExtendMessage", **held, ack_timeout_ms=90_000).held
    retried = rpc("RetryMessage", **held, reason="why")
    assert (retried.outcome, retried.attempts) == ("retrying", 1)
    second = pull()
    assert second.attempt == 2
    assert rpc("ReleaseMessage", topic=topic, id="a", receipt=second.receipt).held
    third = pull(max=5)
    assert third.attempt == 2
    stale = rpc.error("ExtendMessage", **held)
    assert stale.code() is STATUS.FAILED_PRECONDITION
    assert (problem(stale).state, problem(stale).held) == ("in_flight", False)
    for outcome in ("acked", "repeated"):
        assert rpc("AckMessage", topic=topic, id="a", receipt=third.receipt).outcome == outcome


def test_waiting_messages(rpc: Rpc) -> None:
    topic = new_topic()
    messages = [
        {"id": "a", "body_bytes": b"\x00\xff", **LATER},
        {"id": "b", "body_json": "null", **LATER},
        {"body_json": "1", "delay_ms": -1},
        {"body_json": '1, "id": "x"'},
        {"id": "c", "body_json": "2", **LATER},
    ]
    batch = rpc("SendMessages", topic=topic, messages=messages)
    outcomes = [result.outcome for result in batch.results]
    assert outcomes == ["accepted", "accepted", "", "", "accepted"]
    assert (batch.accepted, batch.failed) == (3, 2)
    assert batch.results[2].problem.type == "urn:lisa:problem:invalid"
    assert "not valid UTF-8 JSON" in batch.results[3].problem.detail
    page = rpc("ListMessages", topic=topic, limit=1)
    assert [(row.id, row.state) for row in page.messages] == [("a", "waiting")]
    rest = rpc("ListMessages", topic=topic, cursor=page.cursor)
    assert [row.id for row in rest.messages] == ["b", "c"]
    assert not rest.HasField("cursor")
    found = rpc("GetMessage", topic=topic, id="a")
    assert (found.WhichOneof("content"), found.body_bytes) == ("body_bytes", b"\x00\xff")
    assert rpc("GetMessage", topic=topic, id="b").body_json == "null"
    due_ms = found.due_ms + 5
    moved = rpc("RescheduleMessage", topic=topic, id="a", due_ms=due_ms)
    assert moved.outcome == "rescheduled"
    assert rpc("GetMessage", topic=topic, id="a").due_ms == due_ms
    assert rpc("FireMessage", topic=topic, id="a").outcome == "rescheduled"
    assert rpc("CancelMessage", topic=topic, id="b").outcome == "cancelled"


def test_messages_of_a_key(rpc: Rpc, topic: str) -> None:
    message_id = "k/1\x1fa"
    key: dict[str, Any] = {"topic": topic, "key": "k/1"}
    options = {"key": "k/1", "id": "a", "cost": 2, "slack_ms": 5}
    sent = rpc("SendMessage", topic=topic, message={"body_json": "1", **options, **LATER})
    assert (sent.id, sent.key) == (message_id, "k/1")
    found = rpc("GetMessage", topic=topic, id=message_id)
    assert (found.id, found.key) == (message_id, "k/1")
    moved = rpc("RescheduleKey", **key, shift_ms=-5)
    assert (moved.changed, [one.outcome for one in moved.results]) == (1, ["rescheduled"])
    listed = rpc("ListKey", **key)
    assert (listed.count, listed.HasField("cursor")) == (1, False)
    assert [(one.id, one.due_ms) for one in listed.messages] == [(message_id, found.due_ms - 5)]
    assert rpc("FireKey", **key).changed == 1
    (delivery,) = rpc("Pull", topic=topic, wait_ms=10_000).deliveries
    assert (delivery.id, delivery.key) == (message_id, "k/1")
    assert [(one.id, one.outcome) for one in rpc("CancelKey", **key).results] == [
        (message_id, "in_flight")
    ]
    held: dict[str, Any] = {"topic": topic, "id": message_id, "receipt": delivery.receipt}
    assert rpc("ReleaseMessage", **held).key == "k/1"
    assert problem(rpc.error("ExtendMessage", **held)).key == "k/1"


def test_limits_of_a_key(rpc: Rpc, topic: str) -> None:
    key: dict[str, Any] = {"topic": topic, "key": "k/1"}
    made = rpc("SetLimits", **key, rate="2/s", weight=3)
    assert (made.changed, made.rate, made.weight) == (True, "2/s", 3)
    assert not made.HasField("concurrency")
    found = rpc("GetLimits", **key)
    assert (found.key, found.rate, found.HasField("group")) == ("k/1", "2/s", False)
    listed = rpc("ListLimits", topic=topic)
    assert ([one.key for one in listed.keys], listed.HasField("cursor")) == (["k/1"], False)
    assert rpc("RemoveLimits", **key).changed is True
    assert list(rpc("ListLimits", topic=topic).keys) == []


def test_an_idempotency_key_recognises_a_repeated_send(rpc: Rpc) -> None:
    topic, key = new_topic(), [("idempotency-key", "k")]
    headers = {f"h{n}": str(n) for n in range(20)}
    first, again = (
        rpc(
            "SendMessage",
            topic=topic,
            message={"body_json": "1", "headers": given, **LATER},
            metadata=key,
        )
        for given in (headers, dict(reversed(headers.items())))
    )
    assert first == again
    error = rpc.error("SendMessage", topic=topic, message={"body_json": "2"}, metadata=key)
    assert (error.code(), problem(error).status) == (STATUS.INVALID_ARGUMENT, 422)


def test_topics(rpc: Rpc, topic: str) -> None:
    changed = {"ack_timeout": "30s", "journal": "true", "capacity": "5", "retry_delays": "0s,2m"}
    options = rpc("SetOptions", topic=topic, options=changed).options
    assert {name: options[name] for name in changed} == changed
    options = rpc("SetOptions", topic=topic, reset=["capacity"]).options
    assert options["capacity"] == "unlimited"
    assert rpc("GetOptions", topic=topic).options == options
    own = rpc("SetOptions", topic=topic, group="g", options={"key_rate": "2/s", "fair": "true"})
    assert own.options == {**options, "key_rate": "2/s", "fair": "true"}
    assert rpc("GetOptions", topic=topic, group="g").options == own.options
    assert rpc("GetOptions", topic=topic).options == options
    paused = rpc("PauseTopic", topic=topic)
    assert (paused.paused, paused.changed) == (True, True)
    found = rpc("GetTopic", topic=topic)
    assert (found.paused, found.options["paused"], found.counters["sent"]) == (True, "true", 0)
    assert not rpc("ResumeTopic", topic=topic).paused
    assert [group.name for group in rpc("ListGroups", topic=topic).groups] == ["g"]
    listed = rpc("ListTopics", cursor=topic[:-1], limit=500).topics
    assert topic in [row.topic for row in listed]
    assert rpc("RemoveGroup", topic=topic, group="g").group == "g"
    for name in ("x", "topic", "reset"):  # never taken for the field of that name
        error = rpc.error("SetOptions", topic=topic, options={name: "other"}, reset=["capacity"])
        assert (error.code(), f"`{name}`" in error.details()) == (STATUS.INVALID_ARGUMENT, True)


def test_a_topic_is_watched(rpc: Rpc, topic: str) -> None:
    events = rpc("WatchTopic", topic=topic)
    assert next(events).waiting == 0
    rpc("SendMessage", topic=topic, message={"body_json": "1", **LATER})
    assert next(event for event in events if event.waiting).topic == topic
    events.cancel()


# Errors, access and limits ------------------------------------------------------------------------


def test_errors_have_a_status_and_a_problem(rpc: Rpc) -> None:
    topic = new_topic()
    message = {"id": "a", "body_json": "1", "on_duplicate": "reject", **LATER}
    rpc("SendMessage", topic=topic, message=message)
    error = rpc.error("SendMessage", topic=topic, message=message)
    assert (error.code(), problem(error).id) == (STATUS.ALREADY_EXISTS, "a")
    error = rpc.error("GetMessage", topic=topic, id="x")
    assert (error.code(), problem(error).status) == (STATUS.NOT_FOUND, 404)
    rpc("SetOptions", topic=topic, options={"capacity": "1"})
    error = rpc.error("SendMessage", topic=topic, message={"body_json": "1"})
    assert error.code() is STATUS.RESOURCE_EXHAUSTED
    assert dict(error.trailing_metadata())["retry-after"] == "1"


INVALID: list[tuple[str, dict[str, Any]]] = [
    ("SendMessage", {"topic": "t", "message": {"body_json": '1, "id": "x"'}}),
    ("SendMessage", {"topic": "t", "message": {"body_json": "{"}}),
    ("SendMessage", {"topic": "t"}),
    ("SendMessage", {"message": {"body_json": "1"}}),
    ("Pull", {"topic": "t", "max": 0}),
    ("SetOptions", {"topic": "t", "options": {"window": ""}, "reset": ["window"]}),
    ("ListMessages", {"topic": "t", "state": "nowhere"}),
    ("GetTopic", {"topic": "no spaces"}),
    ("GetTopic", {"topic": "\N{EURO SIGN}" * 10_000}),  # a long detail
]


def test_invalid_requests(rpc: Rpc, channel: grpc.Channel) -> None:
    for method, given in INVALID:
        error = rpc.error(method, **given)
        assert (error.code(), problem(error).status) == (STATUS.INVALID_ARGUMENT, 400), given
    with pytest.raises(grpc.RpcError, match="TopicRequest") as caught:
        channel.unary_unary("/lisa.v1.Lisa/GetTopic")(b"\xff\xff", timeout=TIMEOUT_S)
    assert code(caught.value) is STATUS.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary("/lisa.v1.Lisa/GetTopic")(iter([]), timeout=TIMEOUT_S)
    assert code(caught.value) is STATUS.INVALID_ARGUMENT


def test_a_cancelled_pull_releases_its_messages(gateway: Gateway, rpc: Rpc, topic: str) -> None:
    wanted = request("Pull", topic=topic, wait_ms=30_000, ack_timeout_ms=60_000)
    pulled = rpc.stub.Pull.future(wanted)
    wait_until(lambda: gateway.client.get("/healthz").json()["pulls"] >= 1)
    pulled.cancel()
    wait_until(lambda: gateway.client.get("/healthz").json()["pulls"] == 0)
    rpc("SendMessage", topic=topic, message={"body_json": "1"})
    (delivery,) = rpc("Pull", topic=topic, wait_ms=20_000).deliveries
    assert delivery.attempt == 1


def test_an_open_gateway_refuses_calls_that_a_proxy_passes_on(rpc: Rpc) -> None:
    error = rpc.error("ListTopics", metadata=[("x-forwarded-for", "10.0.0.1")])
    assert error.code() is STATUS.PERMISSION_DENIED


TOKENS = """\
tokens:
  - {name: all, token: "all-0123456789abcdef"}
  - {name: shop, token: "shop-0123456789abcdef", scopes: [produce], topics: ["shop.*"]}
  - {name: work, token: "work-0123456789abcdef", scopes: [consume]}
"""


@pytest.fixture(scope="module")
def secured(
    redis_url: str, manager: Manager, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Gateway, grpc.Channel]]:
    """A gateway with TLS, tokens and two workers, and a channel to it."""
    made = certificates.make(tmp_path_factory.mktemp("secured"))
    config = f"""\
lisa-delay-queue:
  gateway-server: {{workers: 2, producers-read: false, max-body-bytes: 100000}}
  grpc: {{port: 0, tls-cert-file: {made.certificate}, tls-key-file: {made.key}}}
"""
    credentials = grpc.ssl_channel_credentials(made.authority.read_bytes())
    with (
        Gateway(redis_url, config=config, tokens=TOKENS) as running,
        grpc.secure_channel(address(running), credentials) as opened,
    ):
        yield running, opened


def bearer(name: str) -> Metadata:
    return [("authorization", f"Bearer {name}-0123456789abcdef")]


def test_tokens_and_scopes(secured: tuple[Gateway, grpc.Channel]) -> None:
    gateway, channel = secured
    rpc, topic = Rpc(channel), new_topic("shop.")

    def status(token: str | None, method: str = "SendMessage", **fields: Any) -> Any:
        given = {"topic": topic, **fields}
        return rpc.error(method, metadata=bearer(token) if token else (), **given).code()

    message = {"id": "a", "body_json": "1", **LATER}
    assert status(None, message=message) is STATUS.UNAUTHENTICATED
    assert status("absent", message=message) is STATUS.UNAUTHENTICATED
    sent = rpc("SendMessage", topic=topic, message=message, metadata=bearer("shop"))
    assert sent.outcome == "accepted"
    assert status("shop", "GetMessage", id="a") is STATUS.PERMISSION_DENIED
    assert status("shop", topic=new_topic(), message=message) is STATUS.PERMISSION_DENIED
    with Stream(channel, topic, metadata=bearer("shop")) as stream:
        assert stream.wait_for_end() is STATUS.PERMISSION_DENIED
    with Stream(channel, topic, credit=1, metadata=bearer("work")) as stream:
        assert stream.wait_for_end() is STATUS.NOT_FOUND  # must not declare groups
    assert rpc("PauseTopic", topic=topic, metadata=bearer("all")).changed
    audited = "token 'all' from 127.0.0.1: pauseTopic topic="
    wait_until(lambda: any(audited in line for line in gateway.said))
    # Requests are limited to 64 KiB without a token.
    for size, token, limited in (
        (70_000, "all", False),
        (70_000, "absent", True),
        (110_000, "all", True),
    ):
        message = {"body_bytes": b"x" * size, **LATER}
        if limited:
            assert status(token, message=message) is STATUS.RESOURCE_EXHAUSTED
        else:
            rpc("SendMessage", topic=topic, message=message, metadata=bearer(token))


def test_messages_that_are_too_large_when_decompressed_are_not_logged(
    gateway: Gateway, channel: grpc.Channel
) -> None:
    large = pb.ConsumeRequest(started=["x" * 6_000_000])
    consume = Rpc(channel).stub.Consume
    for _ in range(20):
        with pytest.raises(grpc.RpcError) as caught:
            next(consume(iter([large]), compression=grpc.Compression.Gzip, timeout=TIMEOUT_S))
        assert code(caught.value) is STATUS.RESOURCE_EXHAUSTED
    assert not [line for line in gateway.said if "ERROR" in line or "Traceback" in line]


# Standard services, start -------------------------------------------------------------------------


def test_reflection_describes_the_service(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    services = {"lisa.v1.Lisa", "grpc.health.v1.Health"}
    assert services <= set(database.get_services())
    file = database.FindFileContainingSymbol("lisa.v1.Lisa")
    assert [one.name for one in file.service] == ["Lisa"]


def test_watchers_and_streams_of_one_client_shut_out_nobody(redis_url: str) -> None:
    """Health and reflection take no place from calls, and each address has a share of them."""
    tokens = "tokens: [{name: a, token: a-0123456789abcdef}, {name: b, token: b-0123456789abcdef}]"
    env = {f"LISA_GATEWAY_SERVER__MAX_{name}": "50" for name in ("REQUESTS", "POLLS")}
    with (
        Gateway(redis_url, "--grpc-port", "0", tokens=tokens, env=env) as gateway,
        grpc.insecure_channel(address(gateway)) as attacker,
        grpc.insecure_channel(address(gateway), (("grpc.use_local_subchannel_pool", 1),)) as other,
    ):
        assert Rpc(other)("ListTopics", metadata=bearer("a")) is not None
        wanted = health_pb2.HealthCheckRequest()
        watches = [health_pb2_grpc.HealthStub(attacker).Watch(wanted) for _ in range(2_000)]
        wait_until(lambda: sum(not watch.is_active() for watch in watches) >= 1_750)
        with pytest.raises(grpc.RpcError, match="share of 250 health and reflection calls"):
            next(health_pb2_grpc.HealthStub(other).Watch(wanted))
        assert health_pb2_grpc.HealthStub(other).Check(wanted).status == 1
        opened = pb.ConsumeRequest(open={"topic": new_topic()}, credit=1)

        def streams(name: str, count: int) -> list[Any]:
            requests: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(count)]
            for one in requests:
                one.put(opened)
            stub = LisaStub(attacker)
            return [stub.Consume(iter(one.get, None), metadata=bearer(name)) for one in requests]

        greedy = streams("a", 50)
        wait_until(lambda: sum(not one.is_active() for one in greedy) >= 25)
        (modest,) = streams("b", 1)
        assert Rpc(other)("ListTopics", metadata=bearer("a")) is not None
        assert sum(one.is_active() for one in greedy) == 25
        assert modest.is_active()


def test_clients_may_ping_idle_connections(gateway: Gateway) -> None:
    """A server that forbids it sends GOAWAY too_many_pings after the third ping."""
    states: list[grpc.ChannelConnectivity] = []
    options = (
        ("grpc.keepalive_time_ms", 1_500),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    )
    with grpc.insecure_channel(address(gateway), options) as channel:
        assert Rpc(channel)("ListTopics") is not None
        channel.subscribe(states.append)
        time.sleep(9)
    assert states[:1] == [grpc.ChannelConnectivity.READY]
    assert grpc.ChannelConnectivity.IDLE not in states


@pytest.mark.full
def test_idle_connections_leave_files_for_http(redis_url: str) -> None:
    """Connections to the gRPC port beyond its share of the open files are closed."""
    options = ("--grpc-port", "0")
    with Gateway(redis_url, *options, ulimit="-n 200") as gateway, ExitStack() as stack:
        assert any("50 connections by HTTP and as many by gRPC" in line for line in gateway.said)
        host, _, port = address(gateway).rpartition(":")
        idle = [
            stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(190)
        ]

        def are_closed() -> int:
            readable, _, _ = select.select(idle, [], [], 0)
            return sum(is_closed(one) for one in readable)

        wait_until(lambda: are_closed() >= 190 - 50)
        with httpx.Client(base_url=gateway.url, verify=NO_TLS) as client:  # a new connection
            assert client.get("/healthz").status_code == 200
            assert client.get("/v1/topics").status_code == 200
        stack.close()

        def is_answered() -> bool:
            with grpc.insecure_channel(address(gateway)) as channel, suppress(grpc.RpcError):
                return bool(Rpc(channel)("ListTopics"))
            return False

        wait_until(is_answered)


def is_closed(connection: socket.socket) -> bool:
    """Whether a readable connection has ended; an accepted one begins with HTTP/2 settings."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def check_refused(redis_url: str, reason: str, *arguments: str, path: str = "") -> None:
    """Check that a gateway does not start."""
    command = [sys.executable, "-m", "lisa.cli.gateway", "--redis", redis_url, "--port", "0"]
    ended = subprocess.run(
        [*command, *arguments],
        check=False,
        cwd=ROOT,
        env={"PYTHONPATH": f"{path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, reason in ended.stderr) == (2, True), ended.stderr


def test_a_start_that_is_impossible_is_refused_with_the_reason(
    redis_url: str, gateway: Gateway, tmp_path: Path
) -> None:
    port = address(gateway).rpartition(":")[2]
    taken = f"cannot listen on 127.0.0.1:{port}: Address already in use"
    check_refused(redis_url, taken, "--grpc-port", port)
    file = tmp_path / "gateway.yml"
    tls = f"{{port: 0, tls-cert-file: {file}, tls-key-file: {file}}}"
    file.write_text(f"lisa-delay-queue: {{grpc: {tls}}}")
    unusable = f"lisa-gateway: grpc.tls-cert-file {file} and tls-key-file"
    check_refused(redis_url, unusable, "--config", str(file))
    absent = "raise ModuleNotFoundError(\"No module named 'grpc'\", name='grpc')\n"
    (tmp_path / "grpc.py").write_text(absent)
    advice = "grpc is not installed: pip install 'lisa-delay-queue[grpc]'"
    check_refused(redis_url, advice, "--grpc-port", "0", path=str(tmp_path))


def test_a_gateway_without_grpc_does_not_import_it() -> None:
    program = "import sys, lisa.gateway.serving; assert not {'grpc', 'google'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
