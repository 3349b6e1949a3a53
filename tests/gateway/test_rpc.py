"""gRPC: every operation of the HTTP API as a method, errors, access, TLS and standard services."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
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
from lisa.embedded import EmbeddedServer
from lisa.gateway.api import OPERATIONS
from lisa.gateway.rpc import lisa_pb2 as pb
from lisa.gateway.rpc.lisa_pb2_grpc import LisaStub
from lisa.gateway.rpc.methods import CONSUME, SERVICE, method_of
from tests import certificates
from tests.gateways import NO_TLS, Gateway, new_topic
from tests.rpc_client import Stream, address, code, problem
from tests.servers import ROOT, wait_until

STATUS = grpc.StatusCode
TIMEOUT_S = 30


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
def stub(channel: grpc.Channel) -> LisaStub:
    return LisaStub(channel)


def refusal(call: Any, request: Any, **options: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=TIMEOUT_S, **options)
    return caught.value


def topic_with_group(stub: Any) -> str:
    """A new topic with the group `g`."""
    topic = new_topic()
    stub.AddGroup(pb.GroupRequest(topic=topic, group="g"))
    return topic


# The description ----------------------------------------------------------------------------------


def test_every_operation_is_a_method() -> None:
    methods = {one.name for one in SERVICE.methods}
    assert methods - {CONSUME} == {method_of(one) for one in OPERATIONS}
    for one in OPERATIONS:
        is_stream = one.media_type != "application/json"
        assert SERVICE.methods_by_name[method_of(one)].server_streaming is is_stream, one.name


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


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.name)
def test_a_method_has_the_fields_of_its_operation(operation: Any) -> None:
    method = SERVICE.methods_by_name[method_of(operation)]
    given = names_of(operation.query) | names_of(operation.body) | set(operation.parameters)
    returned = names_of(operation.reply)
    if operation.name == "setOptions":
        given = {"topic", "options", "reset"}
    if operation.name in ("getOptions", "setOptions"):
        returned = {"options"}
    assert fields(method.input_type) == renamed(given)
    assert fields(method.output_type) == renamed(returned)


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


def test_a_message_from_its_send_to_its_ack(stub: Any) -> None:
    topic, big = new_topic(), "123456789012345678901234567890"
    assert stub.AddGroup(pb.GroupRequest(topic=topic, group="g")).new
    message = {"id": "a", "body_json": f' {{"n": {big}}} ', "headers": {"h": "v"}, "retry": "0"}
    message["late"] = "skip after 10m"
    trace = ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    request = pb.SendMessageRequest(topic=topic, message=message)
    sent = stub.SendMessage(request, metadata=[trace])
    assert (sent.id, sent.outcome) == ("a", "accepted")
    (one,) = stub.Pull(
        pb.PullRequest(topic=topic, wait_ms=10_000, ack_timeout_ms=60_000)
    ).deliveries
    assert (one.id, one.attempt, dict(one.headers)) == ("a", 1, dict([("h", "v"), trace]))
    assert one.body_json == f'{{"n":{big}}}'
    found = stub.GetMessage(pb.MessageRequest(topic=topic, id="a"))
    assert (found.state, found.groups["g"].state) == ("in_flight", "in_flight")
    held = {"topic": topic, "id": "a", "receipt": one.receipt}
    assert stub.ExtendMessage(pb.ExtendMessageRequest(**held, ack_timeout_ms=90_000)).held
    retried = stub.RetryMessage(pb.RetryMessageRequest(**held, reason="why"))
    assert (retried.outcome, retried.attempts) == ("retrying", 1)
    (two,) = stub.Pull(pb.PullRequest(topic=topic, wait_ms=10_000)).deliveries
    assert two.attempt == 2
    again = {"topic": topic, "id": "a", "receipt": two.receipt}
    assert stub.ReleaseMessage(pb.ReleaseMessageRequest(**again)).held
    (three,) = stub.Pull(pb.PullRequest(topic=topic, wait_ms=10_000, max=5)).deliveries
    assert three.attempt == 2
    stale = refusal(stub.ExtendMessage, pb.ExtendMessageRequest(**held))
    assert code(stale) is STATUS.FAILED_PRECONDITION
    assert (problem(stale).state, problem(stale).held) == ("in_flight", False)
    request = pb.AckMessageRequest(topic=topic, id="a", receipt=three.receipt)
    assert stub.AckMessage(request).outcome == "acked"
    assert stub.AckMessage(request).outcome == "repeated"


def test_waiting_messages(stub: Any) -> None:
    topic = new_topic()
    later = {"delay_ms": 3_600_000}
    batch = stub.SendMessages(
        pb.SendMessagesRequest(
            topic=topic,
            messages=[
                {"id": "a", "body_bytes": b"\x00\xff", **later},
                {"id": "b", "body_json": "null", **later},
                {"body_json": "1", "delay_ms": -1},
                {"body_json": '1, "id": "x"'},
                {"id": "c", "body_json": "2", **later},
            ],
        )
    )
    outcomes = [one.outcome for one in batch.results]
    assert outcomes == ["accepted", "accepted", "", "", "accepted"]
    assert (batch.accepted, batch.failed) == (3, 2)
    assert batch.results[2].problem.type == "urn:lisa:problem:invalid"
    assert "not valid UTF-8 JSON" in batch.results[3].problem.detail
    page = stub.ListMessages(pb.ListMessagesRequest(topic=topic, limit=1))
    assert [(one.id, one.state) for one in page.messages] == [("a", "waiting")]
    rest = stub.ListMessages(pb.ListMessagesRequest(topic=topic, cursor=page.cursor))
    assert [one.id for one in rest.messages] == ["b", "c"]
    assert not rest.HasField("cursor")
    found = stub.GetMessage(pb.MessageRequest(topic=topic, id="a"))
    assert (found.WhichOneof("content"), found.body_bytes) == ("body_bytes", b"\x00\xff")
    assert stub.GetMessage(pb.MessageRequest(topic=topic, id="b")).body_json == "null"
    due = found.due_ms + 5
    moved = pb.RescheduleMessageRequest(topic=topic, id="a", due_ms=due)
    assert stub.RescheduleMessage(moved).outcome == "rescheduled"
    assert stub.GetMessage(pb.MessageRequest(topic=topic, id="a")).due_ms == due
    assert stub.FireMessage(pb.MessageRequest(topic=topic, id="a")).outcome == "rescheduled"
    assert stub.CancelMessage(pb.MessageRequest(topic=topic, id="b")).outcome == "cancelled"


def test_an_idempotency_key_recognises_a_repeated_send(stub: Any) -> None:
    topic = new_topic()
    headers = {f"h{n}": str(n) for n in range(20)}
    message = {"body_json": "1", "headers": headers, "delay_ms": 3_600_000}
    request = pb.SendMessageRequest(topic=topic, message=message)
    key = (("idempotency-key", "k"),)
    first = stub.SendMessage(request, metadata=key)
    reversed_headers = dict(reversed(headers.items()))
    message = {**message, "headers": reversed_headers}
    again = pb.SendMessageRequest(topic=topic, message=message)
    assert stub.SendMessage(again, metadata=key) == first
    other = pb.SendMessageRequest(topic=topic, message={"body_json": "2"})
    error = refusal(stub.SendMessage, other, metadata=key)
    assert (code(error), problem(error).status) == (STATUS.INVALID_ARGUMENT, 422)


def test_topics(stub: Any) -> None:
    topic = topic_with_group(stub)
    changed = {"ack_timeout": "30s", "journal": "true", "capacity": "5", "retry_delays": "0s,2m"}
    options = stub.SetOptions(pb.SetOptionsRequest(topic=topic, options=changed)).options
    assert {name: options[name] for name in changed} == changed
    options = stub.SetOptions(pb.SetOptionsRequest(topic=topic, reset=["capacity"])).options
    assert options["capacity"] == "unlimited"
    assert stub.GetOptions(pb.TopicRequest(topic=topic)).options == options
    paused = stub.PauseTopic(pb.TopicRequest(topic=topic))
    assert (paused.paused, paused.changed) == (True, True)
    found = stub.GetTopic(pb.TopicRequest(topic=topic))
    assert (found.paused, found.options["paused"], found.counters["sent"]) == (True, "true", 0)
    assert not stub.ResumeTopic(pb.TopicRequest(topic=topic)).paused
    assert [one.name for one in stub.ListGroups(pb.TopicRequest(topic=topic)).groups] == ["g"]
    before = pb.ListTopicsRequest(cursor=topic[:-1], limit=500)
    assert topic in [one.topic for one in stub.ListTopics(before).topics]
    assert stub.RemoveGroup(pb.GroupRequest(topic=topic, group="g")).group == "g"
    for name in ("x", "topic", "reset"):  # never taken for the field of that name
        wrong = pb.SetOptionsRequest(topic=topic, options={name: "other"}, reset=["capacity"])
        error = refusal(stub.SetOptions, wrong)
        assert (code(error), f"`{name}`" in error.details()) == (STATUS.INVALID_ARGUMENT, True)


def test_a_topic_is_watched(stub: Any) -> None:
    topic = topic_with_group(stub)
    events = stub.WatchTopic(pb.TopicRequest(topic=topic), timeout=TIMEOUT_S)
    assert next(events).waiting == 0
    message = {"body_json": "1", "delay_ms": 3_600_000}
    stub.SendMessage(pb.SendMessageRequest(topic=topic, message=message))
    assert next(one for one in events if one.waiting).topic == topic
    events.cancel()


# Errors, access and limits ------------------------------------------------------------------------


def test_errors_have_a_status_and_a_problem(stub: Any) -> None:
    topic = new_topic()
    message = {"id": "a", "body_json": "1", "delay_ms": 3_600_000, "on_duplicate": "reject"}
    send = pb.SendMessageRequest(topic=topic, message=message)
    stub.SendMessage(send)
    error = refusal(stub.SendMessage, send)
    assert (code(error), problem(error).id) == (STATUS.ALREADY_EXISTS, "a")
    error = refusal(stub.GetMessage, pb.MessageRequest(topic=topic, id="x"))
    assert (code(error), problem(error).status) == (STATUS.NOT_FOUND, 404)
    stub.SetOptions(pb.SetOptionsRequest(topic=topic, options={"capacity": "1"}))
    full = pb.SendMessageRequest(topic=topic, message={"body_json": "1"})
    error = refusal(stub.SendMessage, full)
    assert code(error) is STATUS.RESOURCE_EXHAUSTED
    assert dict(error.trailing_metadata())["retry-after"] == "1"


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("SendMessage", pb.SendMessageRequest(topic="t", message={"body_json": '1, "id": "x"'})),
        ("SendMessage", pb.SendMessageRequest(topic="t", message={"body_json": "{"})),
        ("SendMessage", pb.SendMessageRequest(topic="t")),
        ("SendMessage", pb.SendMessageRequest(message={"body_json": "1"})),
        ("Pull", pb.PullRequest(topic="t", max=0)),
        ("SetOptions", pb.SetOptionsRequest(topic="t", options={"window": ""}, reset=["window"])),
        ("ListMessages", pb.ListMessagesRequest(topic="t", state="nowhere")),
        ("GetTopic", pb.TopicRequest(topic="no spaces")),
        ("GetTopic", pb.TopicRequest(topic="\N{EURO SIGN}" * 10_000)),  # a long detail
    ],
)
def test_invalid_requests(stub: Any, method: str, request_: Any) -> None:
    error = refusal(getattr(stub, method), request_)
    assert (code(error), problem(error).status) == (STATUS.INVALID_ARGUMENT, 400)


def test_bytes_that_are_no_request(channel: grpc.Channel) -> None:
    error = refusal(channel.unary_unary("/lisa.v1.Lisa/GetTopic"), b"\xff\xff")
    assert (code(error), "TopicRequest" in error.details()) == (STATUS.INVALID_ARGUMENT, True)
    nothing = channel.stream_unary("/lisa.v1.Lisa/GetTopic")
    with pytest.raises(grpc.RpcError) as caught:
        nothing(iter([]), timeout=TIMEOUT_S)
    assert code(caught.value) is STATUS.INVALID_ARGUMENT


def test_a_cancelled_pull_releases_its_messages(gateway: Gateway, stub: Any) -> None:
    topic = topic_with_group(stub)
    pulled = stub.Pull.future(pb.PullRequest(topic=topic, wait_ms=30_000, ack_timeout_ms=60_000))
    wait_until(lambda: gateway.client.get("/healthz").json()["pulls"] >= 1)
    pulled.cancel()
    wait_until(lambda: gateway.client.get("/healthz").json()["pulls"] == 0)
    stub.SendMessage(pb.SendMessageRequest(topic=topic, message={"body_json": "1"}))
    (one,) = stub.Pull(pb.PullRequest(topic=topic, wait_ms=20_000)).deliveries
    assert one.attempt == 1


def test_an_open_gateway_refuses_calls_that_a_proxy_passes_on(stub: Any) -> None:
    metadata = (("x-forwarded-for", "10.0.0.1"),)
    error = refusal(stub.ListTopics, pb.ListTopicsRequest(), metadata=metadata)
    assert code(error) is STATUS.PERMISSION_DENIED


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
    directory = tmp_path_factory.mktemp("secured")
    made = certificates.make(directory)
    tokens = directory / "tokens.yml"
    tokens.write_text(TOKENS)
    config = f"""\
lisa-delay-queue:
  gateway-server:
    {{tokens-file: {tokens}, workers: 2, producers-read: false, max-body-bytes: 100000}}
  grpc: {{port: 0, tls-cert-file: {made.certificate}, tls-key-file: {made.key}}}
"""
    credentials = grpc.ssl_channel_credentials(made.authority.read_bytes())
    with (
        Gateway(redis_url, config=config, directory=directory) as running,
        grpc.secure_channel(address(running), credentials) as opened,
    ):
        yield running, opened


def bearer(name: str) -> dict[str, Any]:
    return {"metadata": (("authorization", f"Bearer {name}-0123456789abcdef"),)}


def test_tokens_and_scopes(secured: tuple[Gateway, grpc.Channel]) -> None:
    gateway, channel = secured
    stub: Any = LisaStub(channel)
    own, other = new_topic("shop."), new_topic()
    message = {"id": "a", "body_json": "1", "delay_ms": 3_600_000}
    send = pb.SendMessageRequest(topic=own, message=message)
    # Calls wait until the workers serve.
    assert code(refusal(stub.SendMessage, send, wait_for_ready=True)) is STATUS.UNAUTHENTICATED
    assert code(refusal(stub.SendMessage, send, **bearer("nobody"))) is STATUS.UNAUTHENTICATED
    assert stub.SendMessage(send, **bearer("shop")).outcome == "accepted"
    get = pb.MessageRequest(topic=own, id="a")
    assert code(refusal(stub.GetMessage, get, **bearer("shop"))) is STATUS.PERMISSION_DENIED
    elsewhere = pb.SendMessageRequest(topic=other, message=message)
    assert code(refusal(stub.SendMessage, elsewhere, **bearer("shop"))) is STATUS.PERMISSION_DENIED
    with Stream(channel, own, **bearer("shop")) as stream:
        wait_until(lambda: stream.status is not None)
        assert stream.status is STATUS.PERMISSION_DENIED
    with Stream(channel, own, credit=1, **bearer("work")) as stream:  # must not declare groups
        wait_until(lambda: stream.status is not None)
        assert stream.status is STATUS.NOT_FOUND
    assert stub.PauseTopic(pb.TopicRequest(topic=own), **bearer("all")).changed
    wait_until(lambda: any("pauseTopic topic=" in line for line in gateway.said))
    assert any("token 'all' from 127.0.0.1: pauseTopic" in line for line in gateway.said)


def test_large_requests_are_refused(secured: tuple[Gateway, grpc.Channel]) -> None:
    stub: Any = LisaStub(secured[1])
    for size, token, status in (
        (70_000, "all", None),
        (70_000, "nobody", STATUS.RESOURCE_EXHAUSTED),  # 64 KiB without a token
        (110_000, "all", STATUS.RESOURCE_EXHAUSTED),
    ):
        message = {"body_bytes": b"x" * size, "delay_ms": 3_600_000}
        request = pb.SendMessageRequest(topic=new_topic(), message=message)
        if status is None:
            stub.SendMessage(request, **bearer(token), wait_for_ready=True)
        else:
            assert code(refusal(stub.SendMessage, request, **bearer(token))) is status


def test_messages_that_are_too_large_when_decompressed_are_not_logged(
    gateway: Gateway, channel: grpc.Channel
) -> None:
    large = pb.ConsumeRequest(started=["x" * 6_000_000])
    stub: Any = LisaStub(channel)
    for _ in range(20):
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Consume(iter([large]), compression=grpc.Compression.Gzip, timeout=TIMEOUT_S))
        assert code(caught.value) is STATUS.RESOURCE_EXHAUSTED
    assert not [line for line in gateway.said if "ERROR" in line or "Traceback" in line]


# Standard services, start -------------------------------------------------------------------------


@pytest.mark.full
def test_health_follows_redis(tmp_path: Path) -> None:
    config = "lisa-delay-queue: {gateway-server: {patience: 500ms}, grpc: {port: 0}}"
    with (
        EmbeddedServer() as server,
        Gateway(server.url, config=config, directory=tmp_path) as gateway,
        grpc.insecure_channel(address(gateway)) as opened,
    ):
        stub = health_pb2_grpc.HealthStub(opened)

        def status() -> Any:
            request = health_pb2.HealthCheckRequest(service="lisa.v1.Lisa")
            return stub.Check(request, wait_for_ready=True, timeout=TIMEOUT_S).status

        wait_until(lambda: status() == health_pb2.HealthCheckResponse.SERVING)
        server.kill()
        wait_until(lambda: status() == health_pb2.HealthCheckResponse.NOT_SERVING)
        server.restart()
        wait_until(lambda: status() == health_pb2.HealthCheckResponse.SERVING)


def test_reflection_describes_the_service(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    services = {"lisa.v1.Lisa", "grpc.health.v1.Health"}
    assert services <= set(database.get_services())
    file = database.FindFileContainingSymbol("lisa.v1.Lisa")
    assert [one.name for one in file.service] == ["Lisa"]


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
            with grpc.insecure_channel(address(gateway)) as channel:
                try:
                    LisaStub(channel).ListTopics(pb.ListTopicsRequest(), timeout=TIMEOUT_S)
                except grpc.RpcError:
                    return False
            return True

        wait_until(is_answered)


def is_closed(connection: socket.socket) -> bool:
    """Whether a readable connection has ended; an accepted one begins with HTTP/2 settings."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def run(redis_url: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lisa.cli.gateway", "--redis", redis_url, "--port", "0"]
    return subprocess.run(
        [*command, *arguments],
        check=False,
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_missing_extra_is_named(redis_url: str, tmp_path: Path) -> None:
    absent = "raise ModuleNotFoundError(\"No module named 'grpc'\", name='grpc')\n"
    (tmp_path / "grpc.py").write_text(absent)
    ended = run(redis_url, "--grpc-port", "0", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert ended.returncode == 2
    assert "grpc is not installed: pip install 'lisa-delay-queue[gateway,grpc]'" in ended.stderr


def test_a_port_in_use_is_refused(redis_url: str, gateway: Gateway) -> None:
    port = address(gateway).rpartition(":")[2]
    ended = run(redis_url, "--grpc-port", port, PYTHONPATH=str(ROOT))
    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in ended.stderr


def test_a_certificate_that_cannot_be_used_is_refused(redis_url: str, tmp_path: Path) -> None:
    file = tmp_path / "gateway.yml"
    file.write_text(
        f"lisa-delay-queue: {{grpc: {{port: 0, tls-cert-file: {file}, tls-key-file: {file}}}}}"
    )
    ended = run(redis_url, "--config", str(file), PYTHONPATH=str(ROOT))
    assert ended.returncode == 2
    assert f"lisa-gateway: grpc.tls-cert-file {file} and tls-key-file" in ended.stderr


def test_a_gateway_without_grpc_does_not_import_it() -> None:
    program = "import sys, lisa.gateway.serving; assert not {'grpc', 'google'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
