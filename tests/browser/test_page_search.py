"""The search for messages, live and archived: by the id's start, and by text."""

import base64
import html
import json
import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import redis
from deltalake import write_deltalake

from lisa import Consumer, Producer
from lisa.admin.messages import LiveState
from lisa.admin.search import MessageQuery, SearchPage, WantedText, search
from lisa.core.model.envelope import Envelope
from lisa.core.model.errors import ConfigError
from lisa.embedded.server import free_port
from lisa.gateway.page import search as page_search
from lisa.gateway.page.search import ArchivePage, ArchiveQuery
from tests.browser.conftest import Site, Visitor
from tests.gateways import Gateway, new_topic
from tests.roles import Cast
from tests.servers import wait_until

HOUR = timedelta(hours=1)


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
    with Producer(redis_url) as producer, Consumer(redis_url) as consumer:
        for name in ("a-waiting", "b-waiting"):
            producer.send("orders", 1, id=name, delay=HOUR)
        for name in ("a-in-flight", "a-ready"):
            producer.send("orders", 1, id=name)
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
        producer.send("orders", "x" * 70_000 + "gr\u00fc\u00dfe", id="too-far", delay=HOUR)
        producer.send("orders", b"\xff\x00", id="bytes", delay=HOUR)
    (page,) = every_page(cast, ["orders"], MessageQuery(wanted="gr\u00fc\u00dfe", in_text=True))
    assert [(hit.id, hit.where) for hit in page.hits] == [
        ("body", "body"),
        ("header", "header trace"),
    ]


NOTE = {
    "note": 'say "hi" at C:\\new',
    "tags": ["a", {"n": 42}],
    "name": "Gr\u00fc\u00df \U0001f600",
}
DIGITS = "0123456789abcdef"
DUMPED = f"000000  {DIGITS.encode().hex(' ')}  {DIGITS}"
SHOWN = json.dumps(NOTE, indent=2, ensure_ascii=False)
COPIES = [
    *[
        (kind, stored, wanted)
        for kind, stored in (
            ("j", json.dumps(NOTE)),
            ("j", json.dumps(NOTE, ensure_ascii=False, separators=(",", ":"))),
            ("s", SHOWN),
        )
        for wanted in (
            SHOWN,
            '"tags": [\n    "a",',
            '"tags":["a",{"n":42}]',
            '"n": 42',
            'say \\"hi\\" at',
            r"C:\\new",
            "GR\u00dc\u00df \U0001f600",
            r"gr\u00fc\u00df \ud83d\ude00",
        )
    ],
    ("s", "e\u0301t\u00e9", "\u00e9te\u0301"),
    ("b", "\0\x01<b>", "00 01 3c"),
    ("b", "\0\x01<b>", "AAE8Yj4="),
    ("b", DIGITS * 3, DUMPED),
    ("b", DIGITS * 3, f"{DUMPED}000010{DUMPED[6:]}"),  # a field for one line drops its end
    ("b", DIGITS * 3, base64.b64encode(DIGITS.encode() * 3).decode()[7:30]),
]
"""A kind of body, how it is stored, and what somebody copies from the page or the sender's code."""


def test_what_one_copies_from_the_page_is_found(tmp_path: Path) -> None:
    for kind, stored, wanted in COPIES:
        whole_body = Envelope("", "", kind, {}, stored.encode())
        assert WantedText(wanted).is_in_body(whole_body), (stored, wanted)
    for kind, stored in {(kind, stored) for kind, stored, _ in COPIES}:
        for other in ('"n": 43', "n 42", "hello", "00 02"):
            assert not WantedText(other).is_in_body(Envelope("", "", kind, {}, stored.encode()))
    archive = write(
        tmp_path,
        [row(i, kind=kind, body=stored.encode()) for i, (kind, stored, _) in enumerate(COPIES)],
    )
    for i, (_, stored, wanted) in enumerate(COPIES):
        if "\u0301" in stored:
            continue  # the archive's SQL cannot compose characters
        pages = whole(archive, ArchiveQuery(wanted=wanted, in_text=True))
        assert f"m{i:03}" in [hit.id for page in pages for hit in page.hits], (stored, wanted)


def test_a_search_by_id_offers_the_bodies(site: Site) -> None:
    topic = new_topic("searched")
    site.producer.send(topic, {"order": 42}, id="first", delay=HOUR)
    wait_until(lambda: topic in site.page("/"))
    page = site.page("/search", q="42", topic=topic)
    link = re.search(r'href="([^"]+)">Search headers and bodies for', page)
    assert link is not None
    assert f"/topics/{topic}/messages/first" in site.page(html.unescape(link[1]))


def test_a_foreign_cursor_is_refused(cast: Cast, client: redis.Redis) -> None:
    query = MessageQuery(wanted="x")
    for cursor in ("x", "[]", "[" * 2000, "[1,2,3,4,5]", '{"a": 1}'):
        with pytest.raises(ConfigError, match="is not a cursor"):
            cast.store.drive(search(cast.store, ["orders"], query, cursor=cursor))
    # One of a group that was removed meanwhile repeats its topic.
    client.zadd("lisa:{orders}:waiting", {"x": 10**13})
    gone = '["orders", "orders", "retry", "gone", ""]'
    page = cast.store.drive(search(cast.store, ["orders"], query, cursor=gone))
    assert [hit.id for hit in page.hits] == ["x"]


def test_a_search_continues_by_a_link_that_can_be_shared(site: Site) -> None:
    topic = new_topic("searched")
    site.producer.send_many(topic, [{"n": f"needle-{i}"} for i in range(2_300)], delay=HOUR)
    wait_until(lambda: topic in site.page("/"))
    page = site.page("/search", **{"q": "NEEDLE-2299", "in": "text", "topic": topic})
    assert "Nothing found so far." in page
    assert f"Looked at 2,000 messages, up to the waiting messages of topic {topic}." in page
    link = re.search(r'href="([^"]+)">Continue the search', page)
    assert link is not None
    found = site.page(html.unescape(link[1]))
    assert "Looked at 300 more live messages in this topic, to the end." in found
    assert found.count(f"/topics/{topic}/messages/") == 1
    assert "lisa pipeline search" in found
    client = site.gateway.client
    assert client.get("/search?q=x&in=text&cursor=nonsense").status_code == 400
    # The start of an id leads to a list, the whole id to the message.
    site.producer.send(topic, 1, id=f"{topic}-order-17", delay=HOUR)
    path = f"/topics/{topic}/messages/{topic}-order-17"
    assert f'href="{path}"' in site.page("/search", q=f"{topic}-ord")
    whole = {"q": f"{topic}-order-17"}
    assert client.get("/search", params=whole).status_code == 303
    # More than one topic may know an id.
    other = new_topic("searched")
    site.producer.send(other, 1, id=f"{topic}-order-17", delay=HOUR)
    wait_until(
        lambda: f'href="/topics/{other}/messages' in client.get("/search", params=whole).text
    )
    assert f'href="{path}"' in site.page("/search", **whole)
    only = client.get("/search", params={**whole, "topic": topic})
    assert (only.status_code, only.headers["location"]) == (303, path)


# Archived messages

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
COLUMNS = pa.schema(
    {
        "topic": pa.string(),
        "id": pa.string(),
        "token": pa.string(),
        "state": pa.string(),
        "attempts": pa.int32(),
        "kind": pa.string(),
        "headers": pa.map_(pa.string(), pa.string()),
        "body": pa.binary(),
        **dict.fromkeys(("due", "sent_at", "settled_at", "updated_at"), pa.timestamp("us", "UTC")),
        "reason": pa.string(),
        "day": pa.date32(),
    }
)
"""The columns that the search reads; tests/spark searches an archive written by the job."""


def row(number: int, **changes: Any) -> dict[str, Any]:
    """A message; its day is one of four."""
    settled = NOON + timedelta(days=number % 4)
    return {
        "topic": "orders",
        "id": f"m{number:03}",
        "token": "tokentok",
        "state": "acked",
        "attempts": 0,
        "kind": "j",
        "headers": [("trace", f"T-{number}")],
        "body": b'{"order": %d}' % number,
        "due": NOON,
        "sent_at": NOON,
        "settled_at": settled,
        "updated_at": settled,
        "reason": None,
        "day": settled.date(),
        **changes,
    }


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """An archive with these messages."""
    table = pa.Table.from_pylist(rows, COLUMNS)
    write_deltalake(folder / "messages", table, partition_by=["day"])
    return folder


def whole(archive: Path, query: ArchiveQuery, **limits: Any) -> list[ArchivePage]:
    """The pages of a search."""
    pages: list[ArchivePage] = []
    while not pages or pages[-1].cursor is not None:
        cursor = pages[-1].cursor if pages else None
        pages.append(
            page_search.search_archive(archive, query, sees=lambda _: True, cursor=cursor, **limits)
        )
    return pages


def test_archived_messages_are_found_once_newest_day_first(tmp_path: Path) -> None:
    live = [row(number, day=None, settled_at=None, state="waiting") for number in range(200, 207)]
    archive = write(tmp_path, [*map(row, range(100)), *live])
    for limits in ({}, {"most": 3}, {"within_s": 0.0}):
        pages = whole(archive, ArchiveQuery(wanted="m"), **limits)
        found = [hit for page in pages for hit in page.hits]
        assert sorted(hit.id for hit in found) == sorted(
            [f"m{number:03}" for number in (*range(100), *range(200, 207))]
        )
        days = [datetime.max.replace(tzinfo=UTC).timestamp()] * 7
        days += [hit.settled_ms / 1000 for hit in found if hit.settled_ms]
        assert days == sorted(days, reverse=True)
    assert [page.day for page in whole(archive, ArchiveQuery(wanted="m"), within_s=0.0)] == [
        None,
        *(date(2026, 11, day) for day in (4, 3, 2, 1)),
    ]


def test_an_archived_message_is_found_by_its_id_first(tmp_path: Path) -> None:
    archive = write(tmp_path, [row(1), row(2, id="m001-b"), row(3, id="m001", topic="mail")])
    (page,) = whole(archive, ArchiveQuery(wanted="m001"))
    assert [(hit.topic, hit.id) for hit in page.hits] == [
        ("mail", "m001"),
        ("orders", "m001"),
        ("orders", "m001-b"),
    ]
    (page,) = whole(archive, ArchiveQuery(wanted="m001", topic="mail"))
    (hit,) = page.hits
    assert (hit.sent_ms, hit.headers) == (1_793_534_400_000, {"trace": "T-3"})
    assert hit.body is not None
    assert hit.body.text == '{\n  "order": 3\n}'


def test_text_is_found_in_archived_messages(tmp_path: Path) -> None:
    rows = [
        row(1, id="utf8", kind="s", body="GR\u00dcSSE Gr\u00fc\u00dfe".encode()),
        row(2, id="header", headers=[("trace", "T-77")], body=None),
        row(3, id="quote", kind="s", body=b"IT'S"),
        row(4, id="slash", kind="s", body=b"a\\b"),
        row(5, id="bytes", kind="b", body=b"\xff\x00"),
        row(6, id="empty", kind=None, headers=None, body=None),
        row(7, id="large", kind="s", body=b"x" * 40_000),
    ]
    archive = write(tmp_path, rows)
    wanted = {"gr\u00fc\u00dfe": ["utf8"], "t-77": ["header"], "it's": ["quote"], "\\": ["slash"]}
    wanted |= {"%": [], "x' OR 'a' = 'a": []}
    for text, found in wanted.items():
        (page,) = whole(archive, ArchiveQuery(wanted=text, in_text=True))
        assert [hit.id for hit in page.hits] == found
    (page,) = whole(archive, ArchiveQuery(wanted="large"))
    assert (page.hits[0].body, page.hits[0].body_bytes) == (None, 40_000), "it is not read"
    for cursor in ("x", "live", "2026-13-01:0", "2026-11-01:x"):
        with pytest.raises(ConfigError, match="is not a cursor"):
            page_search.search_archive(
                archive, ArchiveQuery(wanted="x"), sees=lambda _: True, cursor=cursor
            )


def test_a_store_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"s3://shop/lisa cannot be read: Connection refused"):
        page_search.search_archive("s3://shop/lisa", ArchiveQuery(wanted="x"), sees=lambda _: True)


def test_the_page_searches_the_archive(site: Site, tmp_path: Path) -> None:
    old = [row(number, topic="mail", id=f"<old>{number}") for number in range(60)]
    archive = write(tmp_path / "archive", [*old, row(1, id="<old>hidden")])
    tokens = tmp_path / "tokens.yml"
    tokens.write_text("tokens: [{name: m, token: mail-mail-mail-mail, topics: ['mail']}]", "utf-8")
    given = ("--tokens-file", str(tokens), "--archive", str(archive))
    with Gateway(site.server.url, *given) as gateway, Visitor(gateway.url) as visitor:
        visitor.log_in("mail-mail-mail-mail")
        pages = [visitor.page("/search", q="<old>")]
        further = re.search(r'href="([^"]+)">search the archive', pages[0])
        while further:
            pages.append(visitor.page(html.unescape(further[1])))
            further = re.search(r'href="([^"]+)">Search further back', pages[-1])
        found = re.findall(r'title="&lt;old&gt;(\w+)"', "".join(pages))
        assert sorted(found) == sorted(map(str, range(60)))
        assert "Searched the whole archive" in pages[-1]
        commits = sorted((archive / "messages" / "_delta_log").glob("*.json"))
        for number, left in enumerate((b"", b'{"commitInfo')):
            commits[-1].with_stem(f"{len(commits):020}").write_bytes(left)
            damaged = visitor.get("/search", params={"q": "x", "where": "archive"})
            reason = ("the last commit in messages/_delta_log is empty", "cannot be read: Kernel")
            assert reason[number] in html.unescape(damaged.text)
        (archive / "messages").rename(archive / "moved")
        gone = visitor.get("/search", params={"q": "x", "where": "archive"})
        assert f"there is no archive in {archive}" in html.unescape(gone.text)
    # Without an archive, the page names the command.
    assert "lisa pipeline search" in site.page("/search", q="x", where="archive")
