"""What logs at level INFO and garbage say about outages, failing messages, and stops."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from lisa import Consumer, LisaError, Manager, Message, Producer, ServerUnavailable
from lisa.cli.main import main
from lisa.core.daemon import logs
from lisa.embedded.server import EmbeddedServer, free_port
from lisa.manager.nodes import Node
from tests.consumers import Bench, settled
from tests.servers import wait_until

TOPIC = "orders"
TOPICS = (TOPIC, "reminders", "hooks")


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def topics_of(consumer: Consumer) -> list[dict[str, Any]]:
    return [*consumer.health()["topics"].values()]


def test_a_consumer_logs_a_missing_server_once(caplog: pytest.LogCaptureFixture) -> None:
    """However many topics it has; so it does the end of the outage."""
    port = free_port()
    consumer = Consumer(f"redis://127.0.0.1:{port}/0")
    seen: list[object] = []
    for topic in TOPICS:
        consumer.on(topic, seen.append)
    with consumer:
        unreachable = ["unreachable"] * len(TOPICS)
        wait_until(lambda: [one["state"] for one in topics_of(consumer)] == unreachable)
        [line] = warnings_in(caplog)
        assert "does not answer" in line
        assert "`lisa up` starts a server for development" in line
        with EmbeddedServer(port=port) as server:
            bench = Bench(server.url)
            bench.declare_all(*TOPICS)
            with bench.manager(*TOPICS):
                for topic in TOPICS:
                    wait_until(settled(bench, bench.send(topic, [1])[0], topic))
            consumer.stop()
    assert warnings_in(caplog) == [line]
    again = [one for one in caplog.messages if one.endswith(" again")]
    assert len(again) == 1


def test_a_manager_logs_a_missing_server_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    failed: list[LisaError] = []
    away = Node._lose

    def counted(node: Node, error: LisaError) -> None:
        away(node, error)
        failed.append(error)

    monkeypatch.setattr(Node, "_lose", counted)
    with Manager(url):
        wait_until(lambda: len(failed) >= 3)
    [line] = warnings_in(caplog)
    assert line.startswith(f"{url} does not answer")
    assert "`lisa up` starts a server for development; trying again" in line


def test_an_error_names_the_remedy_for_a_local_server() -> None:
    local, remote = f"redis://127.0.0.1:{free_port()}/0", "redis+cluster://127.0.0.1:1"
    for url in (local, remote):
        with Producer(url, patience="0s") as producer, pytest.raises(ServerUnavailable) as caught:
            producer.send("orders", 1)
        remedy = "; `lisa up` starts a server for development"
        assert str(caught.value).endswith(remedy) is (url == local)


# A message that fails


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What a daemon with `--log-format json` writes."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.configure("json", stream=stream)
    yield stream
    root.handlers[:], root.level = before, level


def lines(written: io.StringIO, text: str) -> list[dict[str, Any]]:
    """The records whose message contains the text."""
    logging.getLogger().handlers[0].flush()
    records = [json.loads(line) for line in written.getvalue().splitlines()]
    return [one for one in records if text in one["message"]]


def fails(message: Message) -> None:
    raise RuntimeError(f"no stock for {message.body}")


def test_each_line_about_a_message_has_its_fields(bench: Bench, written: io.StringIO) -> None:
    """Also if a manager reclaims it. Garbage shows where the handler raised."""
    bench.declare(TOPIC, retry_delays="0")
    bench.declare("held", retry_delays="", ack_timeout="1s")
    [sent], [held] = bench.send(TOPIC, ["socks"]), bench.send("held", [1])
    with (
        Manager(bench.url),
        bench.consumer(fails),
        Consumer(bench.url) as puller,
        Producer(bench.url) as producer,
    ):
        wait_until(lambda: puller.pull("held"))
        wait_until(lambda: len(lines(written, "moved to garbage")) == 2)
        found = producer.get(TOPIC, sent)
    failed = lines(written, "was not handled")
    assert [one["attempt"] for one in failed] == [1, 2]
    dead, reclaimed = sorted(lines(written, "moved to garbage"), key=lambda one: one["id"] == held)
    assert dead["level"] == "error"
    assert (dead["attempt"], reclaimed["attempt"]) == (2, 1)
    assert (reclaimed["topic"], reclaimed["group"], reclaimed["id"]) == ("held", "lisa", held)
    for one in (*failed, dead):
        assert (one["topic"], one["group"], one["id"]) == (TOPIC, "lisa", sent)
        assert one["error"].startswith("Traceback")
        assert one["error"].endswith("RuntimeError: no stock for socks")
    assert found is not None
    assert found.reason == "RuntimeError: no stock for socks"
    assert found.traceback == found.groups["lisa"].traceback
    where = f'File "{__file__}", line {fails.__code__.co_firstlineno + 1}, in fails'
    assert where in str(found.traceback)
    for command in (["garbage", "show", TOPIC, sent], ["get", TOPIC, sent]):
        assert where in run(*command, "--redis", bench.url)
        assert json.loads(run(*command, "--json", "--redis", bench.url)) != []
    (row,) = json.loads(run("garbage", "list", TOPIC, "--json", "--redis", bench.url))["messages"]
    assert (row["reason"], row["traceback"]) == (found.reason, found.traceback)


def run(*command: str) -> str:
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    return done.output


def test_roles_log_that_they_stop_and_have_stopped_but_not_their_jobs(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with Manager(bench.url) as manager, bench.consumer(fails, grace="3s"):
        refreshes = manager._engine.jobs.by_name["refresh"].seconds
        wait_until(lambda: sum(refreshes.numbers()[:-1]) >= 2)
    assert [one for one in caplog.records if one.name.startswith("apscheduler")] == []
    assert len(caplog.records) < 10
    said = [one.getMessage() for one in caplog.records if "stop" in one.getMessage()]
    assert said == [
        "stopping; running handlers have 3 s to finish",
        "stopped",
        f"manager {manager.name}: stopping",
        f"manager {manager.name}: stopped",
    ]
