"""What the log and garbage say about a message that fails; the log at the end of a role."""

from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from lisa import Consumer, Manager, Producer
from lisa.cli.main import main
from lisa.core.daemon import logs
from tests.consumers import Bench
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lisa import Message

TOPIC = "orders"


@pytest.fixture
def bench(bench: Bench) -> Bench:
    bench.declare(TOPIC, retry_delays="0")
    return bench


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
    records = [json.loads(line) for line in written.getvalue().splitlines()]
    return [one for one in records if text in one["message"]]


def fails(message: Message) -> None:
    raise RuntimeError(f"no stock for {message.body}")


def test_each_line_about_a_message_has_its_fields(bench: Bench, written: io.StringIO) -> None:
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, fails)
    with bench.manager(TOPIC), consumer:
        [sent] = bench.send(TOPIC, ["socks"])
        wait_until(lambda: bench.states(TOPIC, sent) == ["garbage"])
        wait_until(lambda: lines(written, "moved to garbage"))
    failed = lines(written, "was not handled")
    assert [one["attempt"] for one in failed] == [1, 2]
    [dead] = lines(written, "moved to garbage")
    assert dead["level"] == "error"
    assert dead["attempt"] == 2
    for one in (*failed, dead):
        assert (one["topic"], one["group"], one["id"]) == (TOPIC, "lisa", sent)
        assert one["error"].startswith("Traceback")
        assert one["error"].endswith("RuntimeError: no stock for socks")


def test_garbage_shows_where_the_handler_raised(bench: Bench) -> None:
    consumer = Consumer(bench.url)
    consumer.on(TOPIC, fails)
    with bench.manager(TOPIC), consumer, Producer(bench.url) as producer:
        [sent] = bench.send(TOPIC, ["socks"])
        wait_until(lambda: bench.states(TOPIC, sent) == ["garbage"])
        found = producer.get(TOPIC, sent)
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


def test_a_reclaimed_message_has_its_fields_too(bench: Bench, written: io.StringIO) -> None:
    bench.configure(TOPIC, retry_delays="", ack_timeout="1s")
    [sent] = bench.send(TOPIC, [1])
    with Consumer(bench.url) as consumer, Manager(bench.url):
        wait_until(lambda: consumer.pull(TOPIC))
        wait_until(lambda: lines(written, "moved to garbage"))
    [dead] = lines(written, "moved to garbage")
    assert (dead["topic"], dead["group"], dead["id"]) == (TOPIC, "lisa", sent)
    assert dead["attempt"] == 1


def test_roles_log_that_they_stop_and_have_stopped(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    consumer = Consumer(bench.url, grace="3s")
    consumer.on(TOPIC, fails)
    with Manager(bench.url) as manager, consumer:
        pass
    said = [one.getMessage() for one in caplog.records if "stop" in one.getMessage()]
    assert said == [
        "stopping; running handlers have 3 s to finish",
        "stopped",
        f"manager {manager.name}: stopping",
        f"manager {manager.name}: stopped",
    ]
