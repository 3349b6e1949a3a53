"""The garbage page over plain HTTP: kinds of reasons, order, and actions at a pace."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Any

import pytest

from lisa.admin import garbage_reasons
from lisa.admin.garbage import GarbageSelection, kind_of
from tests.browser.conftest import browser_of, key_in, now_ms
from tests.gateways import new_topic
from tests.roles import Cast

if TYPE_CHECKING:
    import redis

    from tests.browser.conftest import Site


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
    cursor, seen = None, []
    while True:
        page = cast.store.drive(
            garbage_reasons.newest(
                cast.store, GarbageSelection(topic="orders"), cursor=cursor, limit=3
            )
        )
        seen += [(row.id, row.group) for row in page.rows]
        cursor = page.cursor
        if cursor is None:
            break
    assert seen[:2] == [("new", "lisa"), ("middle", "other")]
    assert seen[-1] == ("old", "lisa")
    assert len(seen) == len(set(seen)) == 24
    assert ("a05", "other") in seen
    with pytest.raises(Exception, match="is not a cursor"):
        cast.store.drive(
            garbage_reasons.newest(cast.store, GarbageSelection(topic="orders"), cursor="x")
        )


def test_reasons_are_counted_by_kind(cast: Cast, client: redis.Redis) -> None:
    die(client, "lisa", {"a": 1_000, "b": 3_000}, "order 1111 is unknown")
    die(client, "lisa", {"c": 2_000}, "order 2222 is unknown")
    die(client, "lisa", {"d": 4_000}, "refused")
    selection = GarbageSelection(topic="orders")
    counts, looked = cast.store.drive(garbage_reasons.by_reason(cast.store, selection))
    assert looked == 4
    assert [(one.kind, one.messages, one.last_ms) for one in counts] == [
        ("order # is unknown", 3, 3_000),
        ("refused", 1, 4_000),
    ]
    few, looked = cast.store.drive(garbage_reasons.by_reason(cast.store, selection, most=1))
    assert (looked, [one.kind for one in few]) == (1, ["refused"])
    of_group = GarbageSelection(topic="orders", died_before_ms=3_000, kind="order # is unknown")
    page = cast.store.drive(garbage_reasons.newest(cast.store, of_group))
    assert [row.id for row in page.rows] == ["c", "a"]


def many_dead(site: Site, topic: str, n: int, reason: str) -> None:
    """Copy a dead message, with a reason of its own."""
    head = f"lisa:{{{topic}}}:"
    site.kill(topic, "first", 1, "the first")
    body: Any = site.raw.get(f"{head}body:first")
    ids = [f"{reason[:3]}{i:03}" for i in range(n)]
    site.raw.mset({f"{head}body:{one}": body for one in ids})
    site.raw.hset(f"{head}g:lisa:reasons", mapping=dict.fromkeys(ids, reason))
    # Recently, because the manager purges old garbage.
    site.raw.zadd(f"{head}g:lisa:garbage", dict.fromkeys(ids, now_ms() - 60_000))


def test_one_kind_is_requeued_after_a_question_with_count_and_pace(site: Site) -> None:
    topic = new_topic("kinds")
    many_dead(site, topic, 12, "HTTP 503")
    site.raw.hset(f"lisa:{{{topic}}}:options", "paused", "1")
    with browser_of(site.url) as client:
        page = client.get(f"/topics/{topic}/garbage").text
        assert page.index(">HTTP 503</a>") < page.index(">the first</a>")  # the most frequent
        address = re.search(r'href="([^"]+)" title="HTTP 503"', page)
        assert address is not None
        own = client.get(html.unescape(address[1])).text
        assert own.count('type="checkbox"') == 12
        form = {"do": "requeue_all", "kind": "HTTP 503", "key": key_in(page)}
        asked = client.post(f"/topics/{topic}/act", data=form).text
        assert "<h1>Requeue 12 messages?</h1>" in asked
        assert '<option value="200" selected>200/s</option>' in asked
        done = client.post(f"/topics/{topic}/act", data={**form, "sure": "yes", "pace": "1000"})
        assert done.headers["location"] == "/?did=requeued&n=12"
        for pace in ("0", "-1", "fast", "1000000"):
            bad = {**form, "sure": "yes", "pace": pace}
            assert client.post(f"/topics/{topic}/act", data=bad).status_code == 400
    assert site.raw.zrange(f"lisa:{{{topic}}}:g:lisa:garbage", 0, -1) == [b"first"]
