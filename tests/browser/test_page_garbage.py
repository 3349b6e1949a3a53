"""Messages and garbage over plain HTTP: reasons, actions at a pace, copies and edits."""

import html
import json
import re
import signal
import time
from datetime import timedelta
from typing import Any

import httpx
import pytest
import redis

from lisa import Consumer
from lisa.admin import fsck, garbage
from lisa.admin.garbage import GarbageSelection, kind_of
from lisa.admin.messages import MessagePage
from lisa.gateway.page.garbage import LEASE_S
from lisa.gateway.page.rendering import actor
from tests.browser.conftest import Site, Visitor, key_in, now_ms
from tests.gateways import Gateway, new_topic
from tests.roles import Cast
from tests.servers import wait_until


def test_the_kind_of_a_reason_omits_what_varies() -> None:
    kinds = {
        "HTTP 503 from partner.example": "HTTP 503 from partner.example",
        "404 Client Error: Not Found for url": "404 Client Error: Not Found for url",
        "[Errno 111] refused, attempt 2": "[Errno 111] refused, attempt #",
        "exit code 3 after 200 lines": "exit code 3 after # lines",
        "order 123456 is unknown\nmore": "order # is unknown",
        "no stock for order 17": "no stock for order #",
        "timed out after 29.87 s": "timed out after # s",
        "no user 01234567-89ab-cdef-0123-456789abcdef": "no user #",
        "object at 0x7f00aa": "object at #",
        None: "no reason recorded",
        "x" * 500: "x" * 160,
    }
    assert {reason: kind_of(reason) for reason in kinds} == kinds


def die(client: redis.Redis, group: str, ids: dict[str, int], reason: str = "") -> None:
    """Put ids in a group's garbage, with their times of death."""
    client.hset("lisa:{orders}:groups", group, "1")
    client.zadd(f"lisa:{{orders}}:g:{group}:garbage", ids)
    for one in ids:
        client.set(f"lisa:{{orders}}:body:{one}", "1TOKENxyz-j00001")
        if reason:
            client.hset(f"lisa:{{orders}}:g:{group}:reasons", one, reason)


def test_pages_are_newest_first_and_complete_at_equal_times(
    cast: Cast, client: redis.Redis
) -> None:
    die(client, "lisa", {f"a{i:02}": 5_000 for i in range(20)} | {"old": 1_000, "new": 9_000})
    die(client, "other", {"a05": 5_000, "middle": 7_000})

    def read(cursor: str | None) -> MessagePage:
        selection = GarbageSelection(topic="orders")
        return cast.store.drive(garbage.newest(cast.store, selection, cursor=cursor, limit=3))

    pages = [read(None)]
    while pages[-1].cursor is not None:
        pages.append(read(pages[-1].cursor))
    seen = [(row.id, row.group) for page in pages for row in page.rows]
    assert seen[:2] == [("new", "lisa"), ("middle", "other")]
    assert seen[-1] == ("old", "lisa")
    assert len(seen) == len(set(seen)) == 24
    assert ("a05", "other") in seen
    with pytest.raises(Exception, match="is not a cursor"):
        read("x")


def test_reasons_are_counted_by_kind(cast: Cast, client: redis.Redis) -> None:
    die(client, "lisa", {"a": 1_000, "b": 3_000}, "order 1111 is unknown")
    die(client, "lisa", {"c": 2_000}, "order 2222 is unknown")
    die(client, "lisa", {"d": 4_000}, "refused")
    selection = GarbageSelection(topic="orders")
    counts, looked = cast.store.drive(garbage.by_reason(cast.store, selection))
    assert looked == 4
    assert [(one.kind, one.messages, one.last_ms) for one in counts] == [
        ("order # is unknown", 3, 3_000),
        ("refused", 1, 4_000),
    ]
    few, looked = cast.store.drive(garbage.by_reason(cast.store, selection, most=1))
    assert (looked, [one.kind for one in few]) == (1, ["refused"])
    of_group = GarbageSelection(topic="orders", died_before_ms=3_000, kind="order # is unknown")
    page = cast.store.drive(garbage.newest(cast.store, of_group))
    assert [row.id for row in page.rows] == ["c", "a"]


def many_dead(site: Site, topic: str, n: int, reason: str) -> None:
    """Copy a dead message, with a reason of its own; requeued messages stay visible."""
    head = f"lisa:{{{topic}}}:"
    site.kill(topic, "first", 1, "the first")
    body: Any = site.raw.get(f"{head}body:first")
    ids = [f"{reason[:3]}{i:03}" for i in range(n)]
    site.raw.mset({f"{head}body:{one}": body for one in ids})
    site.raw.hset(f"{head}g:lisa:reasons", mapping=dict.fromkeys(ids, reason))
    # Recently, because the manager purges old garbage.
    site.raw.zadd(f"{head}g:lisa:garbage", dict.fromkeys(ids, now_ms() - 60_000))
    site.option(topic, "paused", "1")


def test_one_kind_is_requeued_after_a_question_with_count_and_pace(
    site: Site, visitor: Visitor
) -> None:
    topic = new_topic("kinds")
    many_dead(site, topic, 12, "HTTP 503")
    page = visitor.page(f"/topics/{topic}/garbage")
    assert page.index(">HTTP 503</a>") < page.index(">the first</a>")  # the most frequent
    address = re.search(r'href="([^"]+)" title="HTTP 503"', page)
    assert address is not None
    assert visitor.page(html.unescape(address[1])).count('type="checkbox"') == 12
    form = {"kind": "HTTP 503", "key": key_in(page)}
    asked = visitor.act(topic, "requeue_all", **form).text
    assert "<h1>Requeue 12 messages?</h1>" in asked
    assert '<option value="200" selected>200/s</option>' in asked
    done = visitor.did(topic, "requeue_all", sure="yes", pace="1000", **form)
    assert done == "/?did=requeued&n=12"
    for pace in ("0", "-1", "fast", "1000000"):
        bad = visitor.act(topic, "requeue_all", sure="yes", pace=pace, **form)
        assert bad.status_code == 400
    assert site.garbage(topic) == ["first"]


DEAD = 300
PACE = 4


@pytest.fixture
def topic(site: Site) -> str:
    """A paused topic with garbage."""
    name = new_topic("runs")
    many_dead(site, name, DEAD - 1, "refused")
    return name


class Page(Visitor):
    """The garbage page of a topic at one gateway. Each request has a connection of its own."""

    def __init__(self, url: str, topic: str) -> None:
        super().__init__(url, limits=httpx.Limits(max_keepalive_connections=0))
        self._topic = topic

    def do(self, action: str, **fields: str) -> httpx.Response:
        return self.act(self._topic, action, sure="yes", **fields)

    def start(self) -> None:
        begun = self.do("requeue_all", pace=str(PACE))
        assert begun.headers["location"].startswith("/?did=requeue_continues")

    def progress(self) -> int | None:
        """How many messages the shown run has affected; None if the page shows no run."""
        page = self.page(f"/topics/{self._topic}/garbage")
        found = re.search(rf"Requeueing {DEAD} messages at {PACE}/s: (\d+) done", page)
        assert (found is not None) == ("Requeueing" in page) == ('value="stop"' in page)
        return int(found[1]) if found else None

    def stop(self) -> int:
        """Press Stop; returns the number of messages in the notice."""
        found = re.search(r"\?did=stopped&n=(\d+)$", self.do("stop").headers["location"])
        assert found
        return int(found[1])


def run_key(topic: str) -> str:
    return f"lisa:{{{topic}}}:run"


def run_keys(site: Site, topic: str) -> list[str]:
    return [key.decode() for key in site.raw.scan_iter("lisa:*:run*") if topic in key.decode()]


def run_name(site: Site, topic: str) -> str:
    record: Any = site.raw.get(run_key(topic))
    return str(json.loads(record)["run"])


def audited(gateway: Gateway, action: str, topic: str) -> list[int]:
    """The numbers in the records of the audit log about an action."""
    lines = [one for one in gateway.said if f": {action} topic='{topic}'" in one]
    return [int(one.rpartition("done=")[2]) for one in lines]


def test_another_gateway_shows_and_stops_a_run_and_refuses_a_second(site: Site, topic: str) -> None:
    """Each of the other gateway's two processes."""
    with (
        Gateway(site.server.url, "--allow-actions", "--workers", "2") as other,
        Page(site.url, topic) as here,
        Page(other.url, topic) as there,
    ):
        here.start()
        first = there.progress()
        assert first is not None
        wait_until(lambda: (there.progress() or 0) > first)
        for page in (here, *[there] * 12):
            for action in ("requeue_all", "purge_all"):
                refused = page.do(action)
                assert refused.status_code == 409
                assert f"another action on garbage of {topic} is running" in refused.text
        stopped = there.stop()
        assert {page.progress() for page in (here, *[there] * 12)} == {None}
        remaining = len(site.garbage(topic))
        # A step that was interrupted may have been carried out without being counted.
        assert DEAD - remaining - 1 <= stopped <= DEAD - remaining
        wait_until(lambda: audited(site.gateway, "requeued", topic) == [stopped])
        assert audited(other, "stopped", topic) == [stopped]
        assert len(site.garbage(topic)) == remaining
        assert there.stop() == 0
        # A gateway that stops leaves no record of its run.
        there.start()
        assert site.raw.exists(run_key(topic))
        assert other.stop() == 0
        assert not site.raw.exists(run_key(topic))
        remaining = len(site.garbage(topic))
        done = here.do("purge_all")
        assert done.headers["location"] == f"/?did=purged&n={remaining}"
    keys = run_keys(site, topic)
    assert [key.rpartition(":")[0] for key in keys] == [f"{run_key(topic)}:stop"]
    assert all(site.raw.ttl(key) > 0 for key in keys)


@pytest.mark.full
def test_a_run_ends_with_its_killed_process_and_another_can_start(site: Site, topic: str) -> None:
    with Page(site.url, topic) as here:
        with Gateway(site.server.url, "--allow-actions") as other, Page(other.url, topic) as there:
            there.start()
            other.process.send_signal(signal.SIGKILL)
            other.process.wait()
        assert 0 < site.raw.pttl(run_key(topic)) <= LEASE_S * 1000
        assert here.progress() is not None
        assert here.do("requeue_all").status_code == 409
        wait_until(lambda: not site.raw.exists(run_key(topic)))
        assert here.progress() is None
        remaining = len(site.garbage(topic))
        done = here.do("requeue_all")
        assert done.headers["location"] == f"/?did=requeued&n={remaining}"
    assert run_keys(site, topic) == []


@pytest.mark.full
def test_a_process_that_was_suspended_leaves_the_record_of_the_next_run(
    site: Site, topic: str
) -> None:
    with (
        Page(site.url, topic) as here,
        Gateway(site.server.url, "--allow-actions") as other,
        Page(other.url, topic) as there,
    ):
        there.start()
        other.process.send_signal(signal.SIGSTOP)
        try:
            assert here.progress()
            begun = time.monotonic()
            wait_until(lambda: not site.raw.exists(run_key(topic)))
            assert here.progress() is None
            # The process judges by its own clock, from the start of its last renewal.
            time.sleep(max(0.0, begun + LEASE_S - time.monotonic()))
            begun_again = here.do("purge_all", pace=str(PACE))
            assert begun_again.headers["location"].startswith("/?did=purge_continues")
            name = run_name(site, topic)
        finally:
            other.process.send_signal(signal.SIGCONT)
        wait_until(lambda: any("has not been renewed" in one for one in other.said))
        wait_until(lambda: len(audited(other, "requeued", topic)) == 1)
        assert run_name(site, topic) == name
        here.stop()
    assert site.raw.exists(run_key(topic)) == 0


def test_fsck_and_the_deletion_of_a_topic_accept_the_record(site: Site) -> None:
    topic = new_topic("runs")
    site.producer.send(topic, 1, delay="1h")
    site.kill(topic, "dead", 1, "refused")
    store = Cast(site.server.url, topic).store
    with Page(site.url, topic) as page:
        site.raw.set(run_key(topic), b'{"run":"gone","verb":"purge","total":1}', px=60_000)
        page.do("stop")
    assert len(run_keys(site, topic)) == 2
    assert store.drive(fsck.check(store, (topic,))).findings == []
    answer = site.gateway.client.delete(f"/v1/topics/{topic}?confirm={topic}")
    assert answer.status_code == 200, answer.text
    report = store.drive(fsck.check(store, ()))
    assert [one for one in report.findings if one.topic == topic] == []


def test_the_timeline_tells_durations_and_actors(site: Site) -> None:
    names = {
        "consumer@web-1:42": "consumer on web-1, process 42",
        "consumer@fe80::1:42": "consumer on fe80::1, process 42",
        "pipeline": "pipeline",
        "": "",
    }
    assert {name: actor(name) for name in names} == names
    topic = new_topic("line")
    site.option(topic, "journal", "1")
    site.kill(topic, "m", {"a": 1}, "no")
    page = site.page(f"/topics/{topic}/messages/m")
    assert len(re.findall(r'class="gap">[\d.]+ m?s later', page)) == 3
    assert re.search(r"<small>consumer on [^<]+, process \d+</small>", page)


def test_a_copy_is_sent_once_with_headers_and_retries(site: Site, visitor: Visitor) -> None:
    topic, hour = new_topic("again"), timedelta(hours=1)
    site.producer.send(topic, {"a": 1}, id="m", delay=hour, headers={"x": "y"}, retry="7s")
    path = f"/topics/{topic}/messages/m"
    page = visitor.page(path)
    new = re.search(r'name="new" value="([^"]+)"', page)
    assert new is not None
    there = f"/topics/{topic}/messages/{new[1]}"
    form = {"id": "m", "new": new[1], "delay": "2h", "key": key_in(page)}
    sent = visitor.did(topic, "again", **form)
    assert sent == f"{there}?did=again&n=accepted"
    assert "This is the copy." in visitor.page(sent)
    assert visitor.did(topic, "again", **form) == f"{there}?did=again&n=duplicate"
    tags = {visitor.get(path, headers={"HX-Request": "true"}).headers["etag"] for _ in range(2)}
    assert len(tags) == 1
    wait_until(lambda: site.raw.zcard(f"lisa:{{{topic}}}:waiting") == 2)
    copy = site.message(topic, new[1])
    assert (copy.body, copy.headers) == ({"a": 1}, {"x": "y"})
    policies = site.raw.hgetall(f"lisa:{{{topic}}}:policy")
    assert policies[b"m"] == policies[new[1].encode()]


def test_a_copy_has_the_retries_but_not_the_wall_time_of_the_original(
    site: Site, visitor: Visitor
) -> None:
    topic, hour = new_topic("copied"), timedelta(hours=1)
    send, wall = site.producer.send, {"at_local": "2030-12-24T09:00", "tz": "Asia/Tokyo"}
    send(topic, 1, id="once", delay=hour, retry=[])
    own = {"retry": [], "late": "skip after 10m", "cost": 5, "slack": "1s"}
    send(topic, 1, id="skips", delay=hour, **own)  # type: ignore[arg-type]
    send(topic, 1, id="wall", headers={"x": "y"}, **wall)  # type: ignore[arg-type]
    late = "collapse after 10m"
    site.producer.schedule("s", topic=topic, body=1, every="1h", retry="7s", late=late)
    tick = f"s@{round(site.producer.next_ticks(topic, 's', 1)[0].timestamp() * 1000)}"
    for name in ("once", "skips", "wall", tick):
        key = key_in(visitor.page(f"/topics/{topic}/messages/{name}"))
        visitor.did(topic, "again", id=name, new=f"copy-{name}", key=key)
    policies = site.raw.hgetall(f"lisa:{{{topic}}}:policy")
    for original in (b"once", b"skips"):
        assert policies[b"copy-" + original] == policies[original]
    assert policies[f"copy-{tick}".encode()] == b"7000"
    assert site.message(topic, "copy-wall").headers == {"x": "y"}


@pytest.mark.parametrize(
    ("before", "text", "after"),
    [({"a": 1}, '{\r\n "a": 2}', {"a": 2}), ("one\ntwo", "one\r\nthree", "one\nthree")],
)
def test_an_edited_message_replaces_the_dead_one(
    site: Site, visitor: Visitor, before: object, text: str, after: object
) -> None:
    topic = new_topic("edited")
    site.kill(topic, "m", before, "no")
    page = visitor.page(f"/topics/{topic}/messages/m")
    assert '<textarea id="edited"' in page
    form = {"id": "m", "body": text, "key": key_in(page)}
    assert visitor.did(topic, "edit", **form) == "/?did=edit&n=replaced"
    with Consumer(site.server.url) as consumer:
        (delivery,) = consumer.pull(topic, batch=1, wait=timedelta(seconds=10))
        assert (delivery.message.id, delivery.message.body) == ("m", after)
        # The message is in flight, so a form that is sent twice changes nothing.
        assert visitor.did(topic, "edit", **form) == "/?did=edit&n=duplicate"
        delivery.ack()
    gone = visitor.act(topic, "edit", **form)
    assert gone.status_code == 409
    assert "its body was deleted" in gone.text


def test_bodies_that_are_no_json_or_too_long_are_not_edited(
    site: Site, visitor: Visitor, guarded: Gateway
) -> None:
    """An edit needs both scopes, too."""
    topic, euro = new_topic("edited"), "\N{EURO SIGN}"  # three bytes
    for name, body in (("json", {"a": 1}), ("fits", euro * 5_000), ("long", euro * 6_000)):
        site.kill(topic, name, body, "no")
        page = visitor.page(f"/topics/{topic}/messages/{name}")
        assert ('<textarea id="edited"' in page) == (name != "long")
    refused = visitor.act(topic, "edit", id="json", body="{")
    assert refused.status_code == 400
    assert "the edited body is not JSON" in refused.text
    fits = visitor.did(topic, "edit", id="fits", body=euro * 5_000)
    assert fits == "/?did=edit&n=replaced"
    assert set(site.garbage(topic)) == {"json", "long"}
    for token in ("produce-produce-produce", "operate-operate-operate"):
        with Visitor(guarded.url) as limited:
            limited.log_in(token)
            page = limited.page(f"/topics/{topic}/messages/json")
            assert '<textarea id="edited"' not in page
            form = {"id": "json", "body": "{}", "key": key_in(page)}
            assert limited.act(topic, "edit", **form).status_code == 403
