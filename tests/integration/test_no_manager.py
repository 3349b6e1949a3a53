"""Without a manager, messages sent for later stay where they are: every role says so."""

import re
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from click.testing import CliRunner

from lisa import Consumer, Manager, Producer
from lisa.cli.main import main
from lisa.core.store import presence
from lisa.producer import flows
from tests.gateways import NO_TLS, Gateway
from tests.producers import Either
from tests.roles import Cast
from tests.servers import wait_until

SOON = timedelta(milliseconds=100)
SAID = "topic orders: messages are overdue by "


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """All times are a fraction of the usual ones."""
    monkeypatch.setattr(presence, "OVERDUE", timedelta(milliseconds=50))
    monkeypatch.setattr(presence, "BEAT", timedelta(milliseconds=100))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one for one in caplog.messages if "no manager is running" in one]


def test_a_consumer_warns_once(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also of a retry."""
    with Producer(redis_url) as producer, Consumer(redis_url) as consumer:
        producer.send("orders", 1, delay=SOON)
        consumer.subscribe("orders", print)
        consumer.start()
        wait_until(lambda: warnings(caplog))
        for _ in range(3):
            producer.send("orders", 2)
        consumer.stop()
    (said,) = warnings(caplog)
    assert said.startswith(SAID)
    assert said.endswith("start one: lisa-manager")
    caplog.clear()
    Cast(redis_url, topic="retried", group="lisa").declare()
    with Producer(redis_url) as producer, Consumer(redis_url) as consumer:
        producer.send("retried", 1)
        (delivery,) = consumer.pull("retried", wait=timedelta(seconds=60))
        delivery.retry(delay=SOON)
        wait_until(lambda: consumer.pull("retried", wait=SOON) or warnings(caplog))
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_producer_that_keeps_sending_warns_and_so_do_tables(
    redis_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(flows, "REGISTER_EVERY_S", 0.0)  # look at each send
    producer = Either(kind, redis_url)
    producer.send("orders", 1, delay=SOON)
    wait_until(lambda: producer.send("orders", 2) and warnings(caplog))
    producer.send("orders", 2)
    assert len(warnings(caplog)) == 1
    producer.close()
    for command in (["topics"], ["top", "--once", "--interval", "0.1"]):
        wait_until(lambda command=command: said(redis_url, command))  # type: ignore[misc]


def test_nothing_is_said_while_a_manager_runs(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Producer(redis_url) as producer, Manager(redis_url), Consumer(redis_url) as consumer:
        producer.send("orders", 1, delay=SOON)
        wait_until(lambda: consumer.pull("orders", wait=SOON))
        producer.send("paused", 1, delay=SOON)
    assert warnings(caplog) == []


@pytest.mark.full
def test_the_web_page_says_so(redis_url: str) -> None:
    late = datetime.now(UTC) - timedelta(minutes=5)
    with Producer(redis_url) as producer, Gateway(redis_url) as gateway:
        producer.send("orders", 1, at=late)
        producer.send("mail", 1, delay=timedelta(hours=1))
        for path in ("/", "/topics/orders"):
            text = " ".join(
                re.sub("<[^>]+>", "", httpx.get(gateway.url + path, verify=NO_TLS).text).split()
            )
            assert "No manager due messages are not promoted, and schedules create none:" in text
            assert "overdue by 5 m" in text
            assert "Start lisa-manager" in text
        assert "overdue" not in httpx.get(f"{gateway.url}/topics/mail", verify=NO_TLS).text
        with Manager(redis_url):
            wait_until(lambda: "No manager" not in httpx.get(gateway.url, verify=NO_TLS).text)


def said(redis_url: str, command: list[str]) -> bool:
    done = CliRunner().invoke(main, [*command, "--redis", redis_url])
    assert done.exit_code == 0, done.output
    return "no manager is running; start one: lisa-manager" in " ".join(done.output.split())
