"""The search for messages: by a prefix of the id, and by text in headers and body."""

from __future__ import annotations

import html
import re
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from lisa import Consumer, Producer
from lisa.admin.messages import LiveState
from lisa.admin.search import MessageQuery, SearchPage, search
from lisa.core.model.errors import ConfigError
from tests.gateways import Gateway, new_topic
from tests.roles import Cast
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import redis

    from tests.browser.conftest import Site

HOUR = timedelta(hours=1)


@pytest.fixture
def cast(redis_url: str) -> Iterator[Cast]:
    """The topic `orders` with its group."""
    cast = Cast(redis_url, group="lisa").declare()
    yield cast
    cast.store.close()


def every_page(
    cast: Cast, topics: list[str], query: MessageQuery, **limits: int
) -> list[SearchPage]:
    pages: list[SearchPage] = []
    while not pages or pages[-1].cursor is not None:
        cursor = pages[-1].cursor if pages else None
        pages.append(cast.store.drive(search(cast.store, topics, query, cursor=cursor, **limits)))
    return pages


def ids(pages: list[SearchPage]) -> list[str]:
    return [hit.id for page in pages for hit in page.hits]


def test_a_prefix_is_found_in_every_state(cast: Cast, client: redis.Redis, redis_url: str) -> None:
    head = "lisa:{orders}:"
    with Producer(redis_url) as producer:
        for name in ("a-waiting", "b-waiting"):
            producer.send("orders", 1, id=name, delay=HOUR)
        for name in ("a-in-flight", "a-ready"):
            producer.send("orders", 1, id=name)
    with Consumer(redis_url) as consumer:
        (delivery,) = consumer.pull("orders", batch=1, wait=timedelta(seconds=10))
        client.zadd(f"{head}g:lisa:retry", {"a-retry": 10**13})
        client.zadd(f"{head}g:lisa:garbage", {"a-garbage": 1_000})
        query = MessageQuery(wanted="a-")
        (page,) = every_page(cast, ["orders"], query)
        delivery.ack()
    assert [(hit.id, hit.state) for hit in page.hits] == [
        ("a-waiting", LiveState.WAITING),
        ("a-ready", LiveState.READY),
        ("a-in-flight", LiveState.IN_FLIGHT),
        ("a-retry", LiveState.RETRY),
        ("a-garbage", LiveState.GARBAGE),
    ]
    assert (page.looked, {hit.where for hit in page.hits}) == (6, {"id"})


def test_a_cursor_continues_across_topics_without_gaps(cast: Cast, client: redis.Redis) -> None:
    topics = ["one", "two", "three"]
    for topic in topics:
        members = {f"{topic}-{i:03}": 10**13 + i // 7 for i in range(450)}
        client.zadd(f"lisa:{{{topic}}}:waiting", members)
    pages = every_page(cast, topics, MessageQuery(wanted="t"), most=200)
    assert len(pages) > 6
    assert sorted(ids(pages)) == sorted(
        f"{topic}-{i:03}" for topic in ("two", "three") for i in range(450)
    )
    assert sum(page.looked for page in pages) == 1_350
    few = every_page(cast, topics, MessageQuery(wanted="two-0"), most_hits=1)
    assert sorted(ids(few)) == [f"two-{i:03}" for i in range(100)]
    slow = cast.store.drive(search(cast.store, topics, MessageQuery(wanted="x"), within_s=0))
    assert (slow.looked, slow.cursor is not None) == (0, True)


def test_text_is_found_in_headers_and_body(cast: Cast, redis_url: str) -> None:
    with Producer(redis_url) as producer:
        producer.send("orders", {"note": "Gr\u00fc\u00dfe"}, id="body", delay=HOUR)
        producer.send("orders", 1, id="header", headers={"trace": "GR\u00dc\u00dfE-7"}, delay=HOUR)
        producer.send("orders", "x" * 9_000 + "gr\u00fc\u00dfe", id="too-far", delay=HOUR)
        producer.send("orders", b"\xff\x00", id="bytes", delay=HOUR)
    (page,) = every_page(cast, ["orders"], MessageQuery(wanted="gr\u00fc\u00dfe", in_text=True))
    assert [(hit.id, hit.where) for hit in page.hits] == [
        ("body", "body"),
        ("header", "header trace"),
    ]


@pytest.mark.parametrize("cursor", ["x", "[]", "[1,2,3,4,5]", '{"a": 1}'])
def test_a_foreign_cursor_is_refused(cast: Cast, cursor: str) -> None:
    with pytest.raises(ConfigError, match="is not a cursor"):
        cast.store.drive(search(cast.store, ["orders"], MessageQuery(wanted="x"), cursor=cursor))


def test_a_cursor_of_a_removed_group_repeats_its_topic(cast: Cast, client: redis.Redis) -> None:
    client.zadd("lisa:{orders}:waiting", {"x": 10**13})
    gone = '["orders", "orders", "retry", "gone", ""]'
    query = MessageQuery(wanted="x")
    page = cast.store.drive(search(cast.store, ["orders"], query, cursor=gone))
    assert [hit.id for hit in page.hits] == ["x"]


def test_a_search_continues_by_a_link_that_can_be_shared(site: Site) -> None:
    topic = new_topic("searched")
    site.producer.send_many(topic, [{"n": f"needle-{i}"} for i in range(2_300)], delay=HOUR)
    client = site.gateway.client
    wait_until(lambda: topic in client.get("/").text)
    asked = {"q": "NEEDLE-2299", "in": "text", "topic": topic}
    page = client.get("/search", params=asked).text
    assert "Nothing found so far." in page
    assert f"Looked at 2,000 messages, up to the waiting messages of topic {topic}." in page
    link = re.search(r'href="([^"]+)">Continue the search', page)
    assert link is not None
    found = client.get(html.unescape(link[1])).text
    assert "Looked at 300 more live messages in this topic, to the end." in found
    assert found.count(f"/topics/{topic}/messages/") == 1
    assert "lisa pipeline search" in found
    assert client.get("/search?q=x&in=text&cursor=nonsense").status_code == 400


def test_the_start_of_an_id_leads_to_the_message(site: Site) -> None:
    topic = new_topic("prefix")
    site.producer.send(topic, 1, id=f"{topic}-order-17", delay=HOUR)
    client = site.gateway.client
    wait_until(lambda: topic in client.get("/").text)
    page = client.get("/search", params={"q": f"{topic}-ord"}).text
    assert f'href="/topics/{topic}/messages/{topic}-order-17"' in page
    exact = client.get("/search", params={"q": f"{topic}-order-17"})
    assert exact.status_code == 303


def test_a_token_finds_messages_of_its_topics_only(site: Site, tmp_path: Path) -> None:
    mine, other = new_topic("orders"), new_topic("mail")
    for topic in (mine, other):
        site.producer.send(topic, {"a": "shared-text"}, id=f"shared-{topic}", delay=HOUR)
    tokens = tmp_path / "tokens.yml"
    tokens.write_text(
        "tokens: [{name: o, token: orders-orders-orders, topics: ['orders*']}]", encoding="utf-8"
    )
    headers = {"Authorization": "Bearer orders-orders-orders"}
    with Gateway(site.server.url, "--tokens-file", str(tokens), headers=headers) as guarded:
        wait_until(lambda: mine in guarded.client.get("/").text)
        for params in ({"q": "shared-"}, {"q": "shared-text", "in": "text"}):
            page = guarded.client.get("/search", params=params).text
            assert f"shared-{mine}" in page
            assert f"shared-{other}" not in page
            hidden = guarded.client.get("/search", params={**params, "topic": other}).text
            assert f"shared-{other}" not in hidden
