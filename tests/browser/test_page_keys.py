"""The page of a key: its messages and events, changes of all of them, and how it is found."""

import html
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest

from lisa import Consumer
from lisa.core.model.lanes import KeyLimits
from tests.browser.conftest import Site, Tab, Visitor
from tests.gateways import Gateway, new_topic
from tests.servers import wait_until

HOUR = timedelta(hours=1)
US = "\x1f"
ODD_KEYS = ["a/b c", "..", "<b>*{x}", "ключ", "x" * 256]


def key_page(topic: str, key: str) -> str:
    if key == "..":
        return f"/topics/{topic}/key?key={key}"
    return f"/topics/{topic}/keys/{quote(key, safe='')}"


@pytest.fixture
def topic(site: Site) -> str:
    """A topic with a journal, and of the key k a dead, a retried, a held and a waiting message."""
    name = new_topic()
    site.option(name, "journal", "1")
    with Consumer(site.server.url) as consumer:
        for message_id, retry in (("dead", []), ("again", ["1h"]), ("held", [])):
            site.producer.send(name, 1, key="k", id=message_id, retry=retry)
            (delivery,) = consumer.pull(name, batch=1, wait=timedelta(seconds=10))
            if message_id != "held":
                delivery.retry(reason=f"why {message_id}")
    site.producer.send(name, 1, key="k", id="later", delay=HOUR)
    site.producer.send(name, 1, key="other", id="later", delay=HOUR)
    return name


def test_a_key_shows_its_messages_and_events(site: Site, visitor: Visitor, topic: str) -> None:
    path = key_page(topic, "k")
    page = visitor.page(path)
    live, _, events = page.partition("Recent events")
    for message_id, state in (("again", "retry"), ("later", "waiting"), ("dead", "garbage")):
        assert f'href="/topics/{topic}/messages/k%1F{message_id}"' in live
        assert f'class="state {state}">' in live
    assert "why dead" in live
    assert "Limits" not in live
    given = KeyLimits.parse("2/s", 4).encode()
    site.raw.hset(f"lisa:{{{topic}}}:limits", f"lisa{US}k", given)
    assert "<dt>Limits in lisa</dt><dd>rate 2/s, concurrency 4</dd>" in visitor.page(path)
    assert "<dt>Live messages</dt><dd>4</dd>" in live
    assert "other" not in page
    # The newest event first, and each with its message.
    assert events.index("k%1Flater") < events.index("k%1Fheld") < events.index("k%1Fdead")
    assert 'class="state garbage">' in events
    message = visitor.page(f"/topics/{topic}/messages/k%1Flater")
    assert f'<a href="/topics/{topic}/keys/k">k</a>' in message
    quiet = new_topic()
    site.producer.send(quiet, 1, key="k", delay=HOUR)
    assert "keeps no journal" in visitor.page(key_page(quiet, "k"))
    assert "No live message of this key" in visitor.page(key_page(quiet, "none"))
    assert visitor.get(f"/topics/{quiet}/key").status_code == 400
    assert visitor.get(key_page(new_topic(), "k")).status_code == 404
    for crafted in ("cursor=x", "before=x"):
        assert visitor.get(f"/topics/{topic}/keys/k?{crafted}").status_code == 400


@pytest.mark.parametrize("key", ODD_KEYS)
def test_any_key_has_a_page(site: Site, visitor: Visitor, key: str) -> None:
    topic = new_topic()
    site.producer.send(topic, 1, key=key, id="a", delay=HOUR)
    page = visitor.page(key_page(topic, key))
    assert f"{html.escape(key).replace('&#x27;', '&#39;')}</h1>" in page
    found = visitor.get("/search", params={"q": key, "topic": topic})
    assert (found.status_code, found.headers["location"]) == (303, key_page(topic, key))
    leads_to = visitor.did(topic, "cancel_key", message_key=key, sure="yes", back="/")
    assert leads_to == "/?did=cancel_key&n=1&of=1"
    assert str(site.message(topic, f"{key}{US}a").state) == "cancelled"


def test_all_messages_of_a_key_are_changed(site: Site, visitor: Visitor, topic: str) -> None:
    path = key_page(topic, "k")
    due_ms = site.message(topic, f"k{US}later").due_ms
    assert due_ms is not None

    def change(do: str, **fields: str) -> str:
        leads_to = visitor.did(topic, do, message_key="k", back=path, **fields)
        return html.unescape(visitor.page(leads_to))

    assert "Rescheduled 1 of 4. The others are in flight" in change("reschedule_key", shift="-30m")
    assert site.message(topic, f"k{US}later").due_ms == due_ms - 30 * 60_000
    assert "Rescheduled 2 of 4." in change("reschedule_key", delay="2h")
    for both in ({}, {"delay": "1h", "shift": "1h"}):
        refused = visitor.act(topic, "reschedule_key", message_key="k", **both)
        assert refused.status_code == 400
    asked = visitor.act(topic, "cancel_key", message_key="k", back=path).text
    assert "Cancel 4 messages of k?" in asked
    assert "Cancelled 3 of 4. The others are in flight" in change("cancel_key", sure="yes")
    assert str(site.message(topic, f"other{US}later").state) == "waiting"
    site.producer.send(topic, 1, key="k", id="more", delay=HOUR)
    assert "Due now: 1 of 2." in change("fire_key")


def test_limits_of_a_key_are_set_and_removed(site: Site, visitor: Visitor, topic: str) -> None:
    path = key_page(topic, "k")

    def change(do: str, **fields: str) -> str:
        return visitor.page(visitor.did(topic, do, message_key="k", back=path, **fields))

    for wrong in ({}, {"concurrency": "many"}, {"weight": "0"}, {"rate": "fast"}):
        refused = visitor.act(topic, "set_limits", message_key="k", **wrong)
        assert refused.status_code == 400
    page = change("set_limits", rate="10/m, burst 2", weight="3")
    assert "The limits of the key are set." in page
    assert "<dt>Limits</dt><dd>rate 10/m, burst 2, weight 3</dd>" in page
    page = change("set_limits", concurrency="4", group="lisa")
    assert "<dt>Limits in lisa</dt><dd>concurrency 4</dd>" in page
    page = change("remove_limits")
    assert "<dt>Limits</dt>" not in page
    assert "<dt>Limits in lisa</dt>" in page
    assert "Limits in" not in change("remove_limits", group="lisa")


def test_who_may_only_read_changes_no_key(site: Site, guarded: Gateway) -> None:
    topic = new_topic()
    site.producer.send(topic, 1, key="k", id="a", delay=HOUR)
    with Visitor(guarded.url) as reader:
        reader.log_in("reader-reader-reader")
        page = reader.page(key_page(topic, "k"))
        assert "Cancel all" not in page
        assert "Set limits" not in page
        for do in ("fire_key", "set_limits"):
            refused = reader.act(topic, do, message_key="k", weight="2", key="0" * 64)
            assert refused.status_code == 403
    with Visitor(guarded.url) as other:
        other.log_in("orders-orders-orders")
        assert other.get(key_page(topic, "k")).status_code == 403
        assert "topics have" not in other.page("/search?q=k&in=id")


def test_a_search_finds_keys_and_whole_ids(site: Site, visitor: Visitor) -> None:
    topics = sorted(new_topic() for _ in range(2))
    key = f"k-{topics[0]}"
    for topic in topics:
        site.producer.send(topic, 1, key=key, id="a", delay=HOUR)
    # The list of topics is refreshed every few seconds.
    wait_until(lambda: "2 topics have messages" in visitor.page("/search", q=key))
    page = visitor.page("/search", q=key)
    for topic in topics:
        assert f'<a href="/topics/{topic}/keys/{key}">' in page
    site.producer.cancel(topics[1], f"{key}{US}a")
    site.producer.send(topics[0], 1, id=key, delay=HOUR)
    both = visitor.page("/search", q=key)
    assert f'/topics/{topics[0]}/messages/{key}"' in both
    assert f"/topics/{topics[0]}/keys/{key}" in both
    site.producer.send(topics[0], 1, key=key, id="b", delay=HOUR)
    for written in (f"{key} / b", f"{key}{US}b", f"{key}\\u001fb"):
        found = visitor.get("/search", params={"q": written})
        assert found.headers["location"] == f"/topics/{topics[0]}/messages/{key}%1Fb", written
    assert f"{key} / b" in visitor.page("/search", q=key[:-1], **{"in": "id"})


def test_a_copy_and_an_edited_message_keep_their_key(site: Site, visitor: Visitor) -> None:
    topic = new_topic()
    site.producer.send(topic, {"a": 1}, key="k", id="a", retry=[])
    with Consumer(site.server.url) as consumer:
        (delivery,) = consumer.pull(topic, batch=1, wait=timedelta(seconds=10))
        delivery.retry(reason="no stock")
    page = visitor.page(f"/topics/{topic}/garbage")
    assert "k / a</a>" in page
    message_id = f"k{US}a"
    copied = visitor.did(topic, "again", id=message_id, new="copy", delay="1h")
    assert copied == f"/topics/{topic}/messages/k%1Fcopy?did=again&n=accepted"
    edited = visitor.did(topic, "edit", id=message_id, body="2", back="/")
    assert edited == "/?did=edit&n=replaced"
    assert site.message(topic, message_id).body == 2


def test_a_key_is_moved_and_cancelled_in_a_browser(tab: Tab, site: Site, topic: str) -> None:
    tab.open(f"/topics/{topic}/messages/k%1Flater")
    tab.page.get_by_role("link", name="k", exact=True).click()
    tab.page.wait_for_url(f"**{key_page(topic, 'k')}")
    due_ms = site.message(topic, f"k{US}later").due_ms
    tab.page.fill("#shift", "1h")
    tab.press("Reschedule", "did=reschedule_key")
    moved: Any = site.message(topic, f"k{US}later").due_ms
    assert moved - due_ms == HOUR / timedelta(milliseconds=1)
    tab.press("Cancel all", "act")
    tab.press("Cancel 4 messages of k", "did=cancel_key")
    assert "Cancelled 3 of 4" in tab.text(".notice")
