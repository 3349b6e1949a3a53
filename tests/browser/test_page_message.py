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


def test_the_timeline_tells_durations_and_actors(site: Site) -> None:
    names = {
        "consumer@web-1:42": "consumer on web-1, process 42",
        "consumer@fe80::1:42": "consumer on fe80::1, process 42",
        "pipeline": "pipeline",
        "": "",
    }
    assert {name: actor(name) for name in names} == names
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


def test_a_copy_has_the_retries_but_not_the_wall_time_of_the_original(site: Site) -> None:
    topic, hour = new_topic("copied"), timedelta(hours=1)
    send, wall = site.producer.send, {"at_local": "2030-12-24T09:00", "tz": "Asia/Tokyo"}
    send(topic, 1, id="once", delay=hour, retry=[])
    send(topic, 1, id="skips", delay=hour, retry=[], late="skip after 10m")
    send(topic, 1, id="wall", headers={"x": "y"}, **wall)  # type: ignore[arg-type]
    late = "collapse after 10m"
    site.producer.schedule("s", topic=topic, body=1, every="1h", retry="7s", late=late)
    tick = f"s@{round(site.producer.next_ticks(topic, 's', 1)[0].timestamp() * 1000)}"
    with browser_of(site.url) as client:
        for name in ("once", "skips", "wall", tick):
            key = key_in(client.get(f"/topics/{topic}/messages/{name}").text)
            form = {"do": "again", "id": name, "new": f"copy-{name}", "key": key}
            sent = client.post(f"/topics/{topic}/act", data=form)
            assert (sent.status_code, sent.text) == (303, "")
    policies = site.raw.hgetall(f"lisa:{{{topic}}}:policy")
    for original in (b"once", b"skips"):
        assert policies[b"copy-" + original] == policies[original]
    assert policies[f"copy-{tick}".encode()] == b"7000"
    copy = site.producer.get(topic, "copy-wall")
    assert copy is not None
    assert copy.headers == {"x": "y"}


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


def test_bodies_that_are_no_json_or_too_long_are_not_edited(site: Site) -> None:
    topic, euro = new_topic("edited"), "\N{EURO SIGN}"  # three bytes
    site.kill(topic, "json", {"a": 1}, "no")
    site.kill(topic, "fits", euro * 5_000, "no")
    site.kill(topic, "long", euro * 6_000, "no")
    act = f"/topics/{topic}/act"
    with browser_of(site.url) as client:
        pages = {
            name: client.get(f"/topics/{topic}/messages/{name}").text
            for name in ("json", "fits", "long")
        }
        offered = {name: '<textarea id="edited"' in page for name, page in pages.items()}
        assert offered == {"json": True, "fits": True, "long": False}
        key = key_in(pages["json"])
        form = {"do": "edit", "id": "json", "body": "{", "key": key}
        refused = client.post(act, data=form)
        assert refused.status_code == 400
        assert "the edited body is not JSON" in refused.text
        form = {"do": "edit", "id": "fits", "body": euro * 5_000, "key": key}
        assert client.post(act, data=form).headers["location"] == "/?did=edit&n=replaced"
    left = site.raw.zrange(f"lisa:{{{topic}}}:g:lisa:garbage", 0, -1)
    assert set(left) == {b"json", b"long"}


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
