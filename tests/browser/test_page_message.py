"""A message's page over plain HTTP: its timeline, a copy, and an edited message."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from lisa import Consumer
from lisa.gateway.page.rendering import actor
from tests.browser.conftest import browser_of, key_in, waiting
from tests.gateways import Gateway, new_topic

if TYPE_CHECKING:
    from pathlib import Path

    from tests.browser.conftest import Site


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("consumer@web-1:42", "consumer on web-1, process 42"),
        ("consumer@fe80::1:42", "consumer on fe80::1, process 42"),
        ("pipeline", "pipeline"),
        ("", ""),
    ],
)
def test_actors_are_told_in_words(name: str, said: str) -> None:
    assert actor(name) == said


def test_the_timeline_tells_durations_and_actors(site: Site) -> None:
    topic = new_topic("line")
    site.raw.hset(f"lisa:{{{topic}}}:options", "journal", "1")
    site.kill(topic, "m", {"a": 1}, "no")
    page = site.gateway.client.get(f"/topics/{topic}/messages/m").text
    assert len(re.findall(r'class="gap">[\d.]+ m?s later', page)) == 3
    assert re.search(r"<small>consumer on [^<]+, process \d+</small>", page)


def test_a_copy_is_sent_once_with_headers_and_retries(site: Site) -> None:
    topic = new_topic("again")
    site.producer.send(
        topic, {"a": 1}, id="m", delay=timedelta(hours=1), headers={"x": "y"}, retry="7s"
    )
    path = f"/topics/{topic}/messages/m"
    with browser_of(site.url) as client:
        page = client.get(path).text
        new = re.search(r'name="new" value="([^"]+)"', page)
        assert new is not None
        form = {"do": "again", "id": "m", "new": new[1], "delay": "2h", "key": key_in(page)}
        sent = client.post(f"/topics/{topic}/act", data=form)
        there = f"/topics/{topic}/messages/{new[1]}"
        assert sent.headers["location"] == f"{there}?did=again&n=accepted"
        assert "This is the copy." in client.get(sent.headers["location"]).text
        twice = client.post(f"/topics/{topic}/act", data=form)
        assert twice.headers["location"] == f"{there}?did=again&n=duplicate"
        refreshed = client.get(path, headers={"HX-Request": "true"})
        again = client.get(path, headers={"HX-Request": "true"})
        assert refreshed.headers["etag"] == again.headers["etag"]
    waiting(site, topic, 2)
    copy = site.producer.get(topic, new[1])
    assert copy is not None
    assert (copy.body, copy.headers) == ({"a": 1}, {"x": "y"})
    policies = site.raw.hgetall(f"lisa:{{{topic}}}:policy")
    assert policies[b"m"] == policies[new[1].encode()]


@pytest.mark.parametrize("late", [None, "skip after 10m"])
def test_a_copy_of_a_message_without_retries_has_none(site: Site, late: str | None) -> None:
    topic = new_topic("once")
    site.producer.send(topic, 1, id="m", delay=timedelta(hours=1), retry=[], late=late)
    path = f"/topics/{topic}/messages/m"
    with browser_of(site.url) as client:
        form = {"do": "again", "id": "m", "new": "copy", "key": key_in(client.get(path).text)}
        assert client.post(f"/topics/{topic}/act", data=form).status_code == 303
    policies = site.raw.hgetall(f"lisa:{{{topic}}}:policy")
    assert policies[b"copy"] == policies[b"m"]


def test_a_copy_does_not_keep_the_wall_time_of_the_original(site: Site) -> None:
    topic = new_topic("wall")
    site.producer.send(
        topic, 1, id="m", at_local="2030-12-24T09:00", tz="Asia/Tokyo", headers={"x": "y"}
    )
    path = f"/topics/{topic}/messages/m"
    with browser_of(site.url) as client:
        form = {"do": "again", "id": "m", "new": "copy", "key": key_in(client.get(path).text)}
        assert client.post(f"/topics/{topic}/act", data=form).status_code == 303
    copy = site.producer.get(topic, "copy")
    assert copy is not None
    assert copy.headers == {"x": "y"}


def test_an_occurrence_that_collapses_can_be_copied(site: Site) -> None:
    topic = new_topic("collapses")
    site.producer.schedule(
        "s", topic=topic, body=1, every="1h", retry="7s", late="collapse after 10m"
    )
    tick = site.producer.next_ticks(topic, "s", 1)[0]
    form = {"do": "again", "id": f"s@{round(tick.timestamp() * 1000)}", "new": "copy"}
    with browser_of(site.url) as client:
        key = key_in(client.get(f"/topics/{topic}/messages/{form['id']}").text)
        sent = client.post(f"/topics/{topic}/act", data=form | {"key": key})
    assert (sent.status_code, sent.text) == (303, "")
    assert site.raw.hget(f"lisa:{{{topic}}}:policy", "copy") == b"7000"


@pytest.mark.parametrize(
    ("before", "text", "after"),
    [({"a": 1}, '{\r\n "a": 2}', {"a": 2}), ("one\ntwo", "one\r\nthree", "one\nthree")],
)
def test_an_edited_message_replaces_the_dead_one(
    site: Site, before: object, text: str, after: object
) -> None:
    topic = new_topic("edited")
    site.kill(topic, "m", before, "no")
    with browser_of(site.url) as client:
        page = client.get(f"/topics/{topic}/messages/m").text
        assert '<textarea id="edited"' in page
        form = {"do": "edit", "id": "m", "body": text, "key": key_in(page)}
        done = client.post(f"/topics/{topic}/act", data=form)
        assert done.headers["location"] == "/?did=edit&n=replaced"
        with Consumer(site.server.url) as consumer:
            (delivery,) = consumer.pull(topic, batch=1, wait=timedelta(seconds=10))
            assert (delivery.message.id, delivery.message.body) == ("m", after)
            # The message is in flight, so a form that is sent twice changes nothing.
            again = client.post(f"/topics/{topic}/act", data=form)
            assert again.headers["location"] == "/?did=edit&n=duplicate"
            delivery.ack()
        gone = client.post(f"/topics/{topic}/act", data=form)
        assert gone.status_code == 409
        assert "its body was deleted" in gone.text


def test_a_body_that_is_no_json_is_refused(site: Site) -> None:
    topic = new_topic("edited")
    site.kill(topic, "m", {"a": 1}, "no")
    with browser_of(site.url) as client:
        key = key_in(client.get(f"/topics/{topic}/messages/m").text)
        form = {"do": "edit", "id": "m", "body": "{", "key": key}
        refused = client.post(f"/topics/{topic}/act", data=form)
    assert refused.status_code == 400
    assert "the edited body is not JSON" in refused.text
    assert site.raw.zrange(f"lisa:{{{topic}}}:g:lisa:garbage", 0, -1) == [b"m"]


@pytest.mark.parametrize(("length", "is_offered"), [(5_000, True), (6_000, False)])
def test_long_bodies_are_not_offered_for_editing(
    site: Site, length: int, *, is_offered: bool
) -> None:
    topic = new_topic("long")
    site.kill(topic, "m", "\N{EURO SIGN}" * length, "no")  # three bytes each
    with browser_of(site.url) as client:
        page = client.get(f"/topics/{topic}/messages/m").text
        assert ('<textarea id="edited"' in page) is is_offered
        if is_offered:
            form = {"do": "edit", "id": "m", "body": "\N{EURO SIGN}" * length, "key": key_in(page)}
            done = client.post(f"/topics/{topic}/act", data=form)
            assert done.headers["location"] == "/?did=edit&n=replaced"


def test_editing_takes_both_scopes(site: Site, tmp_path: Path) -> None:
    topic = new_topic("scopes")
    site.kill(topic, "m", {"a": 1}, "no")
    tokens = tmp_path / "tokens.yml"
    tokens.write_text(
        "tokens:\n"
        "  - {name: sends, token: produce-produce-produce, scopes: [produce]}\n"
        "  - {name: operates, token: operate-operate-operate, scopes: [operate]}\n",
        encoding="utf-8",
    )
    with Gateway(site.server.url, "--tokens-file", str(tokens), "--allow-actions") as guarded:
        for secret in ("produce-produce-produce", "operate-operate-operate"):
            with browser_of(guarded.url) as client:
                client.post("/login", data={"token": secret, "next": "/"})
                page = client.get(f"/topics/{topic}/messages/m").text
                assert '<textarea id="edited"' not in page
                form = {"do": "edit", "id": "m", "body": "{}", "key": key_in(page)}
                assert client.post(f"/topics/{topic}/act", data=form).status_code == 403
