"""Actions on garbage at a pace, seen and stopped through other gateways and workers."""

from __future__ import annotations

import json
import re
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from lisa.admin import fsck
from lisa.gateway.page.run_records import LEASE_S
from tests.browser.conftest import Site, browser_of, key_in
from tests.browser.test_page_garbage import many_dead
from tests.gateways import NO_TLS, Gateway, new_topic
from tests.roles import Cast
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

DEAD = 300
PACE = 4


@pytest.fixture
def topic(site: Site) -> str:
    """A paused topic with garbage."""
    name = new_topic("runs")
    many_dead(site, name, DEAD - 1, "refused")
    site.raw.hset(f"lisa:{{{name}}}:options", "paused", "1")
    return name


class Page:
    """The garbage page of a topic at one gateway. Each request has a connection of its own."""

    def __init__(self, client: httpx.Client, topic: str) -> None:
        self._client = client
        self._topic = topic
        self._key = key_in(client.get(f"/topics/{topic}/garbage").text)

    def act(self, do: str, **fields: str) -> httpx.Response:
        form = {"do": do, "key": self._key, "sure": "yes", **fields}
        return self._client.post(f"/topics/{self._topic}/act", data=form)

    def start(self) -> None:
        begun = self.act("requeue_all", pace=str(PACE))
        assert begun.headers["location"].startswith("/?did=requeue_continues")

    def progress(self) -> int | None:
        """How many messages the shown run has affected; None if the page shows no run."""
        page = self._client.get(f"/topics/{self._topic}/garbage").text
        found = re.search(rf"Requeueing {DEAD} messages at {PACE}/s: (\d+) done", page)
        assert (found is not None) == ("Requeueing" in page) == ('value="stop"' in page)
        return int(found[1]) if found else None

    def stop(self) -> int:
        """Press Stop; returns the number of messages in the notice."""
        found = re.search(r"\?did=stopped&n=(\d+)$", self.act("stop").headers["location"])
        assert found
        return int(found[1])


@contextmanager
def page_at(url: str, topic: str) -> Iterator[Page]:
    with browser_of(url) as client:
        lone = httpx.Client(
            base_url=url,
            headers=client.headers,
            limits=httpx.Limits(max_keepalive_connections=0),
            timeout=30.0,
            verify=NO_TLS,
        )
        with lone:
            yield Page(lone, topic)


def left(site: Site, topic: str) -> int:
    return int(site.raw.zcard(f"lisa:{{{topic}}}:g:lisa:garbage"))


def run_keys(site: Site, topic: str) -> list[bytes]:
    return [key for key in site.raw.scan_iter("lisa:*:run*") if f"{{{topic}}}".encode() in key]


def run_name(site: Site, topic: str) -> str:
    record: Any = site.raw.get(f"lisa:{{{topic}}}:run")
    return str(json.loads(record)["run"])


def audited(gateway: Gateway, action: str, topic: str) -> list[int]:
    """The numbers in the records of the audit log about an action."""
    lines = [one for one in gateway.said if f": {action} topic='{topic}'" in one]
    return [int(one.rpartition("done=")[2]) for one in lines]


def test_another_gateway_shows_and_stops_a_run_and_refuses_a_second(site: Site, topic: str) -> None:
    with (
        Gateway(site.server.url, "--allow-actions") as other,
        page_at(site.url, topic) as here,
        page_at(other.url, topic) as there,
    ):
        here.start()
        first = there.progress()
        assert first is not None
        wait_until(lambda: (there.progress() or 0) > first)
        for page in (there, here):
            for action in ("requeue_all", "purge_all"):
                refused = page.act(action)
                assert refused.status_code == 409
                assert f"another action on garbage of {topic} is running" in refused.text
        stopped = there.stop()
        assert here.progress() is None
        assert there.progress() is None
        remaining = left(site, topic)
        # A step that was interrupted may have been carried out without being counted.
        assert DEAD - remaining - 1 <= stopped <= DEAD - remaining
        wait_until(lambda: audited(site.gateway, "requeued", topic) == [stopped])
        assert audited(other, "stopped", topic) == [stopped]
        assert left(site, topic) == remaining
        assert there.stop() == 0
        done = there.act("purge_all")
        assert done.headers["location"] == f"/?did=purged&n={remaining}"
    assert [key.rpartition(b":")[0] for key in run_keys(site, topic)] == [
        f"lisa:{{{topic}}}:run:stop".encode()
    ]
    assert all(site.raw.ttl(key) > 0 for key in run_keys(site, topic))


def test_each_worker_shows_and_stops_the_run_of_one(site: Site, topic: str) -> None:
    with (
        Gateway(site.server.url, "--allow-actions", "--workers", "2") as gateway,
        page_at(gateway.url, topic) as page,
    ):
        page.start()
        assert all(page.progress() for _ in range(12))
        assert [page.act("requeue_all").status_code for _ in range(12)] == [409] * 12
        stopped = page.stop()
        assert [page.progress() for _ in range(12)] == [None] * 12
        remaining = left(site, topic)
        assert DEAD - remaining - 1 <= stopped <= DEAD - remaining
        # A gateway that stops leaves no record of its run.
        page.start()
        assert site.raw.exists(f"lisa:{{{topic}}}:run")
        assert gateway.stop() == 0
        assert not site.raw.exists(f"lisa:{{{topic}}}:run")


@pytest.mark.full
def test_a_run_ends_with_its_killed_process_and_another_can_start(site: Site, topic: str) -> None:
    with page_at(site.url, topic) as here:
        with (
            Gateway(site.server.url, "--allow-actions") as other,
            page_at(other.url, topic) as there,
        ):
            there.start()
            other.process.send_signal(signal.SIGKILL)
            other.process.wait()
        assert 0 < site.raw.pttl(f"lisa:{{{topic}}}:run") <= LEASE_S * 1000
        assert here.progress() is not None
        assert here.act("requeue_all").status_code == 409
        wait_until(lambda: not site.raw.exists(f"lisa:{{{topic}}}:run"))
        assert here.progress() is None
        remaining = left(site, topic)
        done = here.act("requeue_all")
        assert done.headers["location"] == f"/?did=requeued&n={remaining}"
    assert run_keys(site, topic) == []


@pytest.mark.full
def test_a_process_that_was_suspended_leaves_the_record_of_the_next_run(
    site: Site, topic: str
) -> None:
    with (
        page_at(site.url, topic) as here,
        Gateway(site.server.url, "--allow-actions") as other,
        page_at(other.url, topic) as there,
    ):
        there.start()
        other.process.send_signal(signal.SIGSTOP)
        try:
            assert here.progress()
            begun = time.monotonic()
            wait_until(lambda: not site.raw.exists(f"lisa:{{{topic}}}:run"))
            assert here.progress() is None
            # The process judges by its own clock, from the start of its last renewal.
            time.sleep(max(0.0, begun + LEASE_S - time.monotonic()))
            begun_again = here.act("purge_all", pace=str(PACE))
            assert begun_again.headers["location"].startswith("/?did=purge_continues")
            name = run_name(site, topic)
        finally:
            other.process.send_signal(signal.SIGCONT)
        wait_until(lambda: any("has not been renewed" in one for one in other.said))
        wait_until(lambda: len(audited(other, "requeued", topic)) == 1)
        assert run_name(site, topic) == name
        here.stop()
    assert site.raw.exists(f"lisa:{{{topic}}}:run") == 0


def test_fsck_and_the_deletion_of_a_topic_accept_the_record(site: Site) -> None:
    topic = new_topic("runs")
    site.producer.send(topic, 1, delay="1h")
    site.kill(topic, "dead", 1, "refused")
    store = Cast(site.server.url, topic).store
    with page_at(site.url, topic) as page:
        site.raw.set(f"lisa:{{{topic}}}:run", b'{"run":"gone","verb":"purge","total":1}', px=60_000)
        page.act("stop")
        assert len(run_keys(site, topic)) == 2
        report = store.drive(fsck.check(store, (topic,)))
        assert report.findings == []
        answer = site.gateway.client.delete(f"/v1/topics/{topic}?confirm={topic}")
        assert answer.status_code == 200, answer.text
        report = store.drive(fsck.check(store, ()))
        assert [one for one in report.findings if one.topic == topic] == []
