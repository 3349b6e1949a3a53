"""Camellia's monitoring: monitor data, topic info, metrics and the in-service flag."""

import mmap
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lisa import Manager
from lisa.gateway.compat.camellia.endpoints import IDLE_S, ServiceState
from tests.gateway.camellia_client import HEALTH, QUEUE, Queue, queue_with_group
from tests.gateways import NO_TLS, Gateway, new_topic
from tests.servers import wait_until

CAMELLIA = {"MONITOR_INTERVAL": "1s", "METRICS_PREFIX": "camellia_", "RETRY_DELAYS": "5m"}
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
BANDS = {
    "sizeOf0To1min": 30 * SECOND,
    "sizeOf1minTo10min": 5 * MINUTE,
    "sizeOf10minTo30min": 20 * MINUTE,
    "sizeOf30minTo1hour": 45 * MINUTE,
    "sizeOf1hourTo6hour": 3 * HOUR,
    "sizeOf6hourTo1day": 12 * HOUR,
    "sizeOf1dayTo7day": 3 * DAY,
    "sizeOf7dayTo30day": 10 * DAY,
    "sizeOf30dayToInfinite": 40 * DAY,
}
NAMES = {"info", "uptime", "start_time", "cpu", "request", "topic_info"}
NAMES |= {"pull_msg_time_gap", "ready_queue_time_gap"}


@pytest.fixture(scope="module")
def watched(redis_url: str, manager: Manager) -> Iterator[Gateway]:
    """A gateway with short intervals, pauses before retries, and a prefix for metrics."""
    env = {f"LISA_CAMELLIA__{name}": value for name, value in CAMELLIA.items()}
    with Gateway(redis_url, env=env) as running:
        yield running


@pytest.fixture
def queue(watched: Gateway, redis_url: str) -> Queue:
    """A new topic with a declared group."""
    return queue_with_group(watched.client, redis_url)


class Intervals:
    """The monitor data of one topic, added up interval by interval."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._last: object = None
        self.counts = Counter[str]()
        self.gaps: dict[str, list[dict[str, Any]]] = {"pullMsg": [], "readyQueue": []}

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """The topic's rows of each list in the last interval."""
        body = self._queue.client.get(f"{QUEUE}/getMonitorData").json()
        assert body["code"] == 200
        return {
            name: [one for one in rows if one["topic"] == self._queue.topic]
            for name, rows in body["data"].items()
        }

    def look(self) -> dict[str, int]:
        """The counts so far; call this at least once per interval."""
        data = self.rows()
        if data != self._last:
            self._last = data
            for row in data["requestStatsList"]:
                self.counts.update({name: row[name] for name in row.keys() - {"topic"}})
            for kind, rows in self.gaps.items():
                rows.extend(data[f"{kind}TimeGapStatsList"])
        return self.counts


def test_monitor_data_counts_by_intervals(queue: Queue) -> None:
    seen = Intervals(queue)
    first, second, third = (queue.send(maxRetry=n)["msgId"] for n in (5, 0, 0))
    deleted = queue.send(delay_ms=HOUR)["msgId"]
    expired = queue.send(ttlMillis=300)["msgId"]
    wait_until(lambda: (seen.look(), queue.status(expired) == 5)[1])
    assert len(queue.pull(batch=2)) == 2
    assert queue.settle(first, ack=True) == 200
    assert queue.settle(second, ack=False) == 200
    assert queue.settle("absent", ack=True) == 404
    assert queue.delete(deleted) == 200
    assert queue.get("absent") is None
    assert len(queue.pull(batch=5, ackTimeoutMillis=100)) == 1
    wait_until(lambda: (seen.look(), queue.status(third) == 6)[1])
    wait_until(lambda: seen.look().get("triggerMsgTimeout"))
    counts = dict(seen.counts)
    assert counts.pop("getMsg") >= 2  # of each wait
    calls = {"sendMsg": 5, "pullMsg": 3, "deleteMsg": 1, "ackMsg": 2}
    events = {"triggerMsgReady": 4, "triggerMsgEndLife": 3, "triggerMsgTimeout": 1}
    assert counts == calls | events
    for rows in seen.gaps.values():
        assert sum(row["count"] for row in rows) == 3
        assert all(0 <= row["avg"] <= row["max"] < 60_000 for row in rows)
    wait_until(lambda: not any(seen.rows().values()))  # separately for each interval


def test_topic_info_counts_each_state(queue: Queue) -> None:
    for delay_ms in (*BANDS.values(), 0, 0, 0):
        queue.send(delay_ms=delay_ms)
    held, nacked = queue.pull(batch=2, ackTimeoutMillis=60_000)
    info, bands = queue.info(), dict.fromkeys(BANDS, 1)
    expected = {"topic": queue.topic, "waitingQueueSize": 9, "waitingQueueInfo": bands}
    expected |= {"readyQueueSize": 1, "ackQueueSize": 2}
    assert list(info.items()) == list(expected.items())
    assert list(info["waitingQueueInfo"]) == list(BANDS)
    queue.settle(held["msgId"], ack=True)
    queue.settle(nacked["msgId"], ack=False)  # it now waits for five minutes
    info = queue.info()
    assert info["waitingQueueInfo"] == bands | {"sizeOf1minTo10min": 2}
    assert [info[f"{name}QueueSize"] for name in ("waiting", "ready", "ack")] == [10, 1, 0]
    listed = queue.client.get(f"{QUEUE}/getTopicInfoList").json()
    assert info in listed["data"]
    assert listed["code"] == 200
    assert [one["topic"] for one in listed["data"]].count(queue.topic) == 1  # C18
    text = queue.client.get(f"{QUEUE}/getMonitorString")
    assert text.headers["content-type"] == "text/plain;charset=UTF-8"
    rows = text.json()
    waiting = info.pop("waitingQueueInfo")
    assert info in rows["topicInfoStats"]
    assert {**waiting, "topic": queue.topic} in rows["waitingQueueStats"]
    gaps = {"requestStats", "pullMsgTimeGapStats", "readyQueueTimeGapStats"}
    assert rows.keys() == {*gaps, "topicInfoStats", "waitingQueueStats"}


def test_an_unknown_topic_is_empty(watched: Gateway) -> None:
    info = Queue(watched.client, new_topic()).info()
    assert [info[f"{name}QueueSize"] for name in ("waiting", "ready", "ack")] == [0, 0, 0]
    assert watched.client.get(f"{QUEUE}/getTopicInfo").status_code == 400
    refused = watched.client.get(f"{QUEUE}/getTopicInfo", params={"topic": "a|b"}).json()
    assert refused == {"code": 400, "data": None}


def test_metrics(queue: Queue) -> None:
    queue.send(delay_ms=2 * HOUR)
    queue.send()
    assert queue.pull(ackTimeoutMillis=60_000)

    def samples() -> dict[tuple[str, str], float]:
        answer = queue.client.get(f"{QUEUE}/metrics")
        assert answer.headers["content-type"] == "text/plain;charset=UTF-8"
        families = list(text_string_to_metric_families(answer.text))
        assert {one.name for one in families} == {f"camellia_{name}" for name in NAMES}
        assert {one.type for one in families} == {"gauge"}
        return {
            (one.name.removeprefix("camellia_"), one.labels.get("type", "")): one.value
            for family in families
            for one in family.samples
            if one.labels.get("topic", queue.topic) == queue.topic
        }

    found: dict[tuple[str, str], float] = {}

    def shows_the_pull() -> bool:
        """Only the interval of the pull does."""
        found.update(now := samples())
        return ("pull_msg_time_gap", "max") in now

    wait_until(shows_the_pull)
    for kind in ("waitingQueueSize", "size_1hour_6hour", "ackQueueSize"):
        assert found["topic_info", kind] == 1
    counts = Counter(name for name, _ in found)
    assert (counts["topic_info"], counts["request"]) == (12, 8)
    assert found["pull_msg_time_gap", "count"] == found["info", ""] == 1
    assert 0 < found["start_time", ""] <= time.time() * 1000
    assert found["uptime", ""] > 0
    assert found["cpu", "cpu_num"] >= 1


def test_workers_share_the_in_service_flag(redis_url: str, manager: Manager) -> None:
    lone = httpx.Limits(max_keepalive_connections=0)  # separate connections, so all workers respond
    with (
        Gateway(redis_url, "--workers", "2") as gateway,
        httpx.Client(base_url=gateway.url, limits=lone, verify=NO_TLS) as client,
    ):

        def codes(name: str) -> set[tuple[int, str]]:
            answers = [client.get(f"{HEALTH}/{name}") for _ in range(20)]
            return {(answer.status_code, answer.text) for answer in answers}

        up, down = (200, '{"code":200}\n'), (500, '{"code":500}\n')
        assert codes("status") == {up}
        Queue(gateway.client, new_topic()).send(delay_ms=HOUR)
        assert gateway.client.post(f"{HEALTH}/offline").status_code == 500  # a client just called
        assert codes("status") == {down}
        assert codes("check") == {up}
        Queue(gateway.client, new_topic()).send(delay_ms=HOUR)  # requests are still served
        assert gateway.client.get(f"{HEALTH}/online").json() == {"code": 200}
        assert codes("status") == {up}


def test_offline_succeeds_after_20_s_without_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    shared = mmap.mmap(-1, 64)
    service, other_worker = ServiceState(shared), ServiceState(shared)
    assert not service.go_offline()
    now += IDLE_S
    other_worker.used()
    assert not service.go_offline()
    now += IDLE_S + 0.001
    assert other_worker.go_offline()
    assert not service.is_online
    other_worker.go_online()
    assert ServiceState(shared).is_online
    assert ServiceState(shared).go_offline()  # a worker that starts again is no client
