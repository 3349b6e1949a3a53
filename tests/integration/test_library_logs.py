"""What a program that uses Lisa as a library finds in its own log at level INFO."""

from __future__ import annotations

import logging

import pytest

from lisa import Consumer, LisaError, Manager, Producer, ServerUnavailable
from lisa.embedded.server import EmbeddedServer, free_port
from lisa.manager.server_monitor import ServerMonitor
from tests.consumers import Bench, settled
from tests.servers import wait_until

TOPICS = ("orders", "reminders", "hooks")


@pytest.fixture(autouse=True)
def _everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_a_manager_does_not_log_its_jobs(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with Manager(redis_url) as manager:
        refreshes = manager._engine._jobs.seconds["refresh"]
        wait_until(lambda: sum(refreshes.numbers()[:-1]) >= 2)
    assert [one for one in caplog.records if one.name.startswith("apscheduler")] == []
    assert 0 < len(caplog.records) < 5


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_consumer_logs_a_missing_server_once(caplog: pytest.LogCaptureFixture) -> None:
    """However many topics it has; so it does the end of the outage."""
    port = free_port()
    consumer = Consumer(f"redis://127.0.0.1:{port}/0")
    seen: list[object] = []
    for topic in TOPICS:
        consumer.on(topic, seen.append)
    with consumer:
        wait_until(lambda: len(consumer.health()["topics"]) == len(TOPICS))
        wait_until(
            lambda: (
                {one["state"] for one in consumer.health()["topics"].values()} == {"unreachable"}
            )
        )
        wait_until(lambda: consumer._runtime._heartbeat._failing)  # type: ignore[union-attr]
        [line] = lines(caplog)
        assert "does not answer" in line
        assert "`lisa up` starts a server for development" in line
        with EmbeddedServer(port=port) as server:
            bench = Bench(server.url)
            for topic in TOPICS:
                bench.declare(topic)
            with bench.manager(*TOPICS):
                for topic in TOPICS:
                    wait_until(settled(bench, bench.send(topic, [1])[0], topic))
            consumer.stop()
            bench.store.close()
    assert lines(caplog) == [line]
    again = [one for one in caplog.messages if one.endswith(" again")]
    assert len(again) == 1


def test_a_manager_logs_a_missing_server_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    failed: list[LisaError] = []
    away = ServerMonitor._away

    def counted(monitor: ServerMonitor, error: LisaError) -> None:
        away(monitor, error)
        failed.append(error)

    monkeypatch.setattr(ServerMonitor, "_away", counted)
    with Manager(url):
        wait_until(lambda: len(failed) >= 3)
    [line] = lines(caplog)
    assert line.startswith(f"{url} does not answer")
    assert "`lisa up` starts a server for development; trying again" in line


def test_a_producers_error_names_the_remedy() -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    with Producer(url, patience="0s") as producer, pytest.raises(ServerUnavailable) as caught:
        producer.send("orders", 1)
    assert str(caught.value).endswith("; `lisa up` starts a server for development")


def test_a_remote_server_cannot_be_started_here() -> None:
    with (
        Producer("redis+cluster://127.0.0.1:1", patience="0s") as producer,
        pytest.raises(ServerUnavailable) as caught,
    ):
        producer.send("orders", 1)
    assert "lisa up" not in str(caught.value)
