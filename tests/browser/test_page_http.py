"""The page over plain HTTP: access, forms, caching and cost."""

from __future__ import annotations

import base64
import concurrent.futures
import html
import json
import re
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import msgspec
import pytest
import uuid_utils

from lisa import Consumer
from lisa.core.model.envelope import id_time_ms, new_id
from lisa.embedded import EmbeddedServer
from lisa.gateway.access import Access, Scope, Token
from lisa.gateway.page import sessions
from lisa.gateway.page.rendering import link
from tests.browser.conftest import Site, browser_of, key_in
from tests.gateways import NO_TLS, Gateway, declared_topic, new_topic
from tests.servers import connect, wait_until

TOKENS = """
tokens:
  - {name: all, token: everything-everything, scopes: [produce, consume, operate]}
  - {name: orders, token: orders-orders-orders, scopes: [produce], topics: ['orders.*']}
"""


@pytest.fixture(scope="module")
def guarded(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with access tokens on the same server."""
    directory: Path = tmp_path_factory.mktemp("tokens")
    (directory / "tokens.yml").write_text(TOKENS, encoding="utf-8")
    arguments = ("--tokens-file", str(directory / "tokens.yml"), "--allow-actions")
    with Gateway(site.server.url, *arguments) as running:
        yield running


def log_in(client: httpx.Client, token: str, path: str = "/") -> httpx.Response:
    return client.post("/login", data={"token": token, "next": path})


def test_pages_hold_no_foreign_content_and_no_inline_script(site: Site) -> None:
    topic = new_topic()
    site.producer.send(topic, {"a": 1}, delay=timedelta(hours=1))
    paths = ("/", "/consumers", "/topics/none-such", "/search?q=x")
    for path in (*paths, f"/topics/{topic}", f"/topics/{topic}/garbage"):
        answer = site.gateway.client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", answer.text)
        assert not re.search(r"""(?:src|href|action)=["'](?:https?:)?//""", answer.text)


def test_files_are_kept_for_good_and_have_their_types(site: Site) -> None:
    page = site.gateway.client.get("/").text
    addresses = set(re.findall(r'(?:src|href)="(/static/[^"]+)"', page))
    types = {}
    for address in addresses:
        answer = site.gateway.client.get(address)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        types[address.rpartition("/")[2]] = answer.headers["content-type"]
    assert types == {
        "favicon.svg": "image/svg+xml",
        "lisa.css": "text/css; charset=utf-8",
        "lisa.js": "text/javascript; charset=utf-8",
        "htmx.min.js": "text/javascript; charset=utf-8",
        "uPlot.iife.min.js": "text/javascript; charset=utf-8",
        "uPlot.min.css": "text/css; charset=utf-8",
    }
    stale = site.gateway.client.get("/static/000000000000/lisa.css")
    assert (stale.status_code, stale.headers["cache-control"]) == (200, "no-cache")
    for path in ("/static/0/../../page/visits.py", "/static/0/none.css", "/static/0/%2e%2e/x"):
        assert site.gateway.client.get(path).status_code == 404
    assert site.gateway.client.get("/favicon.ico").headers["content-type"] == "image/svg+xml"


def test_unchanged_content_is_not_sent_again(site: Site) -> None:
    first = site.gateway.client.get("/search")
    tag = first.headers["etag"]
    again = site.gateway.client.get("/search", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    other = site.gateway.client.get("/search?q=none-such", headers={"If-None-Match": tag})
    assert other.status_code == 200


def test_without_actions_the_page_only_shows(site: Site) -> None:
    topic = new_topic()
    message_id = site.producer.send(topic, 1, delay=timedelta(hours=1))
    with Gateway(site.server.url) as plain, browser_of(plain.url) as client:
        page = client.get(f"/topics/{topic}/messages/{message_id}")
        assert page.status_code == 200
        assert 'method="post"' not in page.text
        assert not client.cookies
        edit = client.get(f"/topics/{topic}/schedule/edit?name=daily")
        assert "--allow-actions" in edit.text
        answer = client.post(f"/topics/{topic}/act", data={"do": "cancel", "id": message_id})
        assert answer.status_code == 403
        assert "--allow-actions" in answer.text
    found = site.producer.get(topic, message_id)
    assert found is not None
    assert found.state == "waiting"


def test_a_form_needs_the_key_of_its_own_session(site: Site) -> None:
    topic = new_topic()
    site.producer.send(topic, 1, delay=timedelta(hours=1))
    act, path = f"/topics/{topic}/act", f"/topics/{topic}"
    with browser_of(site.url) as mine, browser_of(site.url) as other:
        key = key_in(mine.get(path).text)
        foreign = key_in(other.get(path).text)
        assert key != foreign
        for wrong in ({}, {"key": ""}, {"key": foreign}, {"key": "0" * 64}, {"key": "é"}):
            assert mine.post(act, data={"do": "pause", **wrong}).status_code == 403
        with browser_of(site.url) as stranger:
            assert stranger.post(act, data={"do": "pause", "key": key}).status_code == 403
        assert mine.get(act).status_code == 405
        evil = mine.post(act, data={"do": "pause", "key": key}, headers={"Origin": "http://evil"})
        assert evil.status_code == 403
        assert site.raw.hget(f"lisa:{{{topic}}}:options", "paused") is None
        done = mine.post(act, data={"do": "pause", "key": key, "back": path})
        assert (done.status_code, done.headers["location"]) == (303, f"{path}?did=paused")
    assert site.raw.hget(f"lisa:{{{topic}}}:options", "paused") == b"1"


def test_invalid_forms_are_distinguished_from_faults(site: Site) -> None:
    topic = new_topic()
    message_id = site.producer.send(topic, 1, delay=timedelta(hours=1))
    act = f"/topics/{topic}/act"
    with browser_of(site.url) as client:
        key = key_in(client.get(f"/topics/{topic}").text)
        for data in (
            {"do": "explode"},
            {"do": ""},
            {"do": "requeue", "pick": "no-slash"},
            {"do": "cancel", "id": "", "sure": "yes"},
            {"do": "requeue", "pick": "lisa/"},
            {"do": "reschedule", "id": message_id, "delay": "soon"},
            {"do": "reschedule", "id": message_id, "delay": "", "at_local": ""},
            {"do": "reschedule", "id": message_id, "at_local": "noon", "tz": "UTC"},
            {"do": "reschedule", "id": message_id, "at_local": "2030-12-24T09:00"},
            {"do": "purge_all", "older": "-"},
            {"do": "requeue", "pick": "no-group/x"},
        ):
            answer = client.post(act, data={"key": key, **data})
            assert 400 <= answer.status_code < 500, (data, answer.status_code)
        raw = client.post(act, content=b"key=%ff\xff", headers={"Origin": site.url})
        assert raw.status_code in (400, 403)


def test_a_confirmation_applies_to_the_counted_messages(site: Site) -> None:
    topic = new_topic("asked")
    act = f"/topics/{topic}/act"
    site.kill(topic, "before", 1, "no")
    with browser_of(site.url) as client:
        key = key_in(client.get(f"/topics/{topic}/garbage").text)
        none = client.post(act, data={"do": "purge", "key": key})
        assert "Purge 0 messages?" in none.text
        assert "disabled" in none.text
        asked = client.post(act, data={"do": "purge_all", "key": key}).text
        assert "Purge 1 message?" in asked
        fields = dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', asked))
        site.kill(topic, "meanwhile", 1, "no")
        done = client.post(act, data=fields)
        assert done.headers["location"] == "/?did=purged&n=1"
    assert site.raw.zrange(f"lisa:{{{topic}}}:g:lisa:garbage", 0, -1) == [b"meanwhile"]


def test_one_hostile_body_does_not_hide_the_rest(site: Site) -> None:
    topic = new_topic("nested")
    site.kill(topic, "plain", "easy to read", "no")
    site.producer.send(topic, msgspec.Raw(b"[" * 1_900 + b"]" * 1_900), id="deep")
    with Consumer(site.server.url) as consumer:  # which cannot read it
        assert consumer.pull(topic, wait=timedelta(seconds=1)) == []
    assert site.raw.zcard(f"lisa:{{{topic}}}:g:lisa:garbage") == 2
    garbage = site.gateway.client.get(f"/topics/{topic}/garbage")
    assert garbage.status_code == 200
    assert "easy to read" in garbage.text
    page = site.gateway.client.get(f"/topics/{topic}/messages/deep")
    assert page.status_code == 200
    assert "[" * 1_900 in page.text


def test_a_topic_shows_its_ramp_and_a_skipped_message_its_state(site: Site) -> None:
    client, topic = site.gateway.client, declared_topic(site.gateway.client)
    options = {"late": "skip after 1h", "ramp": "1/h"}
    assert client.patch(f"/v1/topics/{topic}/options", json=options).status_code == 200
    now_ms = int(time.time() * 1000)
    for n in range(4):
        site.producer.send(topic, 1, id=f"backlog{n}", at_ms=now_ms - 60_000)
    site.producer.send(topic, 1, id="old", at_ms=now_ms - 7_200_000)
    wait_until(lambda: site.raw.zcard(f"lisa:{{{topic}}}:waiting") == 3)
    page = client.get(f"/topics/{topic}").text
    (tile,) = re.findall(r"On the ramp.{,200}", page, re.DOTALL)
    assert "<dd>3 <small>ends in 3\xa0h<" in tile
    assert "skip after 1h" in page
    assert "skipped" in client.get(f"/topics/{topic}/messages/old").text


def test_a_filter_reads_a_limited_number_per_request(site: Site) -> None:
    topic = new_topic("many")
    site.kill(topic, "first", 1, "no")
    head = f"lisa:{{{topic}}}:g:lisa:"
    body: Any = site.raw.get(f"lisa:{{{topic}}}:body:first")
    ids = [f"x{i:04}" for i in range(6_000)]
    site.raw.zadd(head + "garbage", {one: 10**13 + i for i, one in enumerate(ids)})
    site.raw.mset({f"lisa:{{{topic}}}:body:{one}": body for one in ids})
    site.raw.hset(head + "reasons", ids[0], "the one")
    page = site.gateway.client.get(f"/topics/{topic}/garbage?reason=the+one").text
    assert "more messages follow" in page
    (address,) = re.findall(r'href="([^"]+)">Next', page)
    assert ids[0] in site.gateway.client.get(html.unescape(address)).text


def test_foreign_data_hides_no_page(site: Site) -> None:
    topic = new_topic("broken")
    site.producer.send(topic, 1, delay=timedelta(hours=1))
    try:
        site.raw.hset(f"lisa:{{{topic}}}:stats", "foreign", "text")
        site.raw.zadd("lisa:topics", {"not a {topic}": 1})
        wait_until(lambda: topic in site.gateway.client.get("/").text)
        for path in ("/", f"/topics/{topic}", "/consumers", "/managers"):
            assert site.gateway.client.get(path).status_code == 200, path
    finally:
        site.raw.zrem("lisa:topics", "not a {topic}")
        site.raw.hdel(f"lisa:{{{topic}}}:stats", "foreign")


def test_missing_objects_and_unknown_addresses_get_a_page(site: Site) -> None:
    client = site.gateway.client
    missing = ("none-such", "none-such/garbage", "none-such/messages", "none-such/messages/x")
    for path in (*missing, "%20", "a%2Fb"):
        answer = client.get(f"/topics/{path}")
        assert 400 <= answer.status_code < 500
        assert "Traceback" not in answer.text
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    for path in ("/none", "/topics", "/topics/a/b/c/d", "/v2/x", "/topics/a/act"):
        page = client.get(path, headers=browser)
        assert page.status_code == (405 if path.endswith("act") else 404)
        assert page.headers["content-type"].startswith("text/html")
        assert '<nav aria-label="Main">' in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        program = client.get(path, headers={"Accept": "application/json"})
        assert program.headers["content-type"] == "application/problem+json"
        assert program.status_code == page.status_code
    posted = client.post("/none", headers={**browser, "Origin": site.url})
    assert posted.headers["content-type"] == "application/problem+json"


def test_other_requests_ask_for_a_token(guarded: Gateway) -> None:
    """Unknown addresses, live pages of a session that has ended, and programs."""
    asked = guarded.client.get("/none?x=1", headers={"Accept": "text/html"})
    assert (asked.status_code, asked.headers["location"]) == (303, "/login?next=%2Fnone%3Fx%3D1")
    headers = {"HX-Request": "true", "HX-Current-URL": f"{guarded.url}/consumers"}
    answer = guarded.client.get("/consumers", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["hx-redirect"] == "/login?next=%2Fconsumers"
    good = {"Authorization": "Bearer everything-everything"}
    assert guarded.client.get("/", headers=good).status_code == 200
    bad = {"Authorization": "Bearer no-no-no-no-no-no-no"}
    assert guarded.client.get("/", headers=bad).status_code in (303, 401)


def test_crafted_positions_and_filters_are_refused(site: Site) -> None:
    """Redis refuses some of these positions, too, which would look like an outage."""
    client, topic = site.gateway.client, declared_topic(site.gateway.client)
    for position in ("٣-٣", "1--1", "x", f"1-{1 << 64}", f"{1 << 64}-1"):
        for state in ("ready", "in_flight"):
            query = {"state": state, "cursor": f"g/{position}"}
            assert client.get(f"/topics/{topic}/messages", params=query).status_code == 400
            place = json.dumps([topic, topic, state, "g", position])
            search = {"q": "x", "in": "text", "topic": topic, "cursor": place}
            assert client.get("/search", params=search).status_code == 400
    site.raw.hset(f"lisa:{{{topic}}}:options", "journal", "1")
    site.producer.send(topic, 1, id="m", delay=timedelta(hours=1))
    for position in ("0", "0-0", "18446744073709551616-0", "x", "1-1/x"):
        path = f"/topics/{topic}/messages/m"
        assert client.get(path, params={"before": position}).status_code == 400
    for cursor in ("٣", "9" * 20):
        page = client.get(f"/topics/{topic}/schedules", params={"cursor": cursor})
        assert page.status_code == 200
    for query_text in ("cursor=x", "cursor=/9:9:9", "group=none", "older=abc", "cursor=%00"):
        answer = client.get(f"/topics/{topic}/garbage?{query_text}")
        assert answer.status_code in (200, 400, 404)


def test_a_token_is_asked_for_and_kept_out_of_sight(guarded: Gateway) -> None:
    with browser_of(guarded.url) as client:
        asked = client.get("/consumers?topic=a")
        assert asked.status_code == 303
        assert asked.headers["location"] == "/login?next=%2Fconsumers%3Ftopic%3Da"
        assert log_in(client, "wrong-wrong-wrong-wrong").status_code == 403
        entered = log_in(client, "everything-everything", "/consumers")
        assert (entered.status_code, entered.headers["location"]) == (303, "/consumers")
        cookie = entered.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "everything" not in cookie
        assert client.get("/").status_code == 200
        assert "redis://" in client.get("/managers").text
        assert client.post("/logout").status_code == 303
        assert client.get("/").status_code == 303


def test_a_logout_ends_the_session_at_every_gateway(guarded: Gateway, site: Site) -> None:
    with browser_of(guarded.url) as client:
        log_in(client, "everything-everything")
        stolen = {"Cookie": f"{sessions.COOKIE}={client.cookies[sessions.COOKIE]}"}
        log_in(client, "everything-everything")
        other = {"Cookie": f"{sessions.COOKIE}={client.cookies[sessions.COOKIE]}"}
        client.cookies.clear()
        assert client.get("/", headers=stolen).status_code == 200
        assert client.post("/logout", headers=stolen).status_code == 303
        again = client.get("/consumers", headers=stolen)
        assert (again.status_code, again.headers["location"]) == (303, "/login?next=%2Fconsumers")
        assert client.get("/", headers=other).status_code == 200
        ended = list(site.raw.scan_iter("lisa:logout:*"))
        assert ended
        assert all(0 < site.raw.pttl(key) <= sessions.LASTS_S * 1000 for key in ended)


def test_a_login_leads_back_to_any_id_and_nowhere_else(guarded: Gateway) -> None:
    path = link("topics", "t", "messages", "50%25 a?b#c")
    with browser_of(guarded.url) as client:
        asked = client.get(path).headers["location"]
        back = parse_qs(urlsplit(asked).query)["next"][0]
        assert log_in(client, "everything-everything", back).headers["location"] == path
        for foreign in ("//evil.example", "/\\evil.example", "https://evil.example", "x"):
            entered = log_in(client, "everything-everything", foreign)
            assert entered.headers["location"] == "/"


def test_actions_and_refused_logins_are_audited(guarded: Gateway, site: Site) -> None:
    topic, since = new_topic("orders"), len(guarded.said)
    site.producer.send(topic, 1, delay="1h")
    with browser_of(guarded.url) as client:
        for _ in range(3):
            log_in(client, "wrong-wrong-wrong-wrong")
        log_in(client, "everything-everything")
        page = client.get(f"/topics/{topic}").text
        form = {"key": key_in(page), "do": "pause", "back": "/"}
        assert client.post(f"/topics/{topic}/act", data=form).status_code == 303

    def audited(text: str) -> list[str]:
        said = [one for one in guarded.said[since:] if "lisa.gateway.audit" in one]
        return [one for one in said if text in one]

    wait_until(lambda: bool(audited(topic)))
    (done,) = audited(topic)
    assert f"token 'all' from 127.0.0.1: paused topic='{topic}' session=" in done
    assert len(audited("refused")) <= 1  # the others are summarised ten seconds later
    refused = "login from 127.0.0.1 refused: the token is not valid"
    assert any(one.endswith(refused) for one in guarded.said)
    assert not [one for one in guarded.said if "wrong-wrong" in one]


def test_a_cookie_cannot_be_forged(guarded: Gateway) -> None:
    with browser_of(guarded.url) as client:
        log_in(client, "orders-orders-orders")
        good = client.cookies[sessions.COOKIE]
        payload, _, signature = good.partition(".")
        name = base64.urlsafe_b64encode(b'["all",9999999999,"x"]').decode().rstrip("=")
        forged = (
            f"{name}.{signature}",
            f"{payload}.{'0' * 64}",
            payload,
            "",
            ".",
            "a.b",
            "x" * 5000,
        )
        client.cookies.clear()
        for value in forged:
            answer = client.get("/", headers={"Cookie": f"{sessions.COOKIE}={value}"})
            assert answer.status_code == 303, value


def test_a_session_ends_with_its_time_and_with_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    token = Token.of("a", "secret-secret-secret", [Scope.OPERATE])
    cookie = sessions.issue(token)
    session = sessions.read(Access([token]), cookie)
    assert session is not None
    assert session.token == token
    changed = Token.of("a", "another-another-another", [Scope.OPERATE])
    assert sessions.read(Access([changed]), cookie) is None
    assert sessions.read(Access([]), cookie) is None
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + sessions.LASTS_S + 1)
    assert sessions.read(Access([token]), cookie) is None


def test_a_token_sees_and_touches_its_own_topics_only(guarded: Gateway, site: Site) -> None:
    mine, other = new_topic("orders.a"), new_topic("mail")
    for topic in (mine, other):
        site.producer.send(topic, {"a": 1}, id=f"in-{topic}", delay=timedelta(hours=1))
    with browser_of(guarded.url) as client:
        log_in(client, "orders-orders-orders")
        wait_until(lambda: mine in client.get("/").text)
        assert other not in client.get("/").text
        for path in ("", "/garbage", "/messages", f"/messages/in-{other}"):
            assert client.get(f"/topics/{other}{path}").status_code == 403
        assert client.get(f"/consumers?topic={other}&name=x").status_code == 403
        assert "redis://" not in client.get("/managers").text
        assert f"in-{other}" not in client.get(f"/search?q=in-{mine}").text
        assert "No topic has a message" in client.get(f"/search?q=in-{other}").text
        page = client.get(f"/topics/{mine}/messages/in-{mine}").text
        assert "Cancel" in page  # the scope produce is enough
        assert "Pause" not in client.get(f"/topics/{mine}").text
        key = key_in(page)
        answers = [
            client.post(f"/topics/{topic}/act", data={"do": verb, "key": key}).status_code
            for topic, verb in ((mine, "pause"), (mine, "purge_all"), (other, "cancel"))
        ]
        assert answers == [403, 403, 403]


def test_a_crowd_of_viewers_costs_the_server_one_reader(site: Site) -> None:
    def looks() -> int:
        stats = site.raw.info("commandstats")
        return int(stats["cmdstat_zcard"]["calls"])

    for i in range(5):
        site.producer.send(new_topic(f"crowd-{i}"), 1, delay=timedelta(hours=1))
    topics = site.raw.zcard("lisa:topics")
    site.gateway.client.get("/")
    per_look = topics * 4  # one ZCARD of waiting and at most three of groups, for each topic
    before, begun = looks(), time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(16) as crowd:
        answers = list(
            crowd.map(lambda _: httpx.get(f"{site.url}/", verify=NO_TLS).status_code, range(160))
        )
    seconds = time.monotonic() - begun
    assert answers == [200] * 160
    # Data is read at most once a second: the cost of 160 visits depends on their duration.
    assert looks() - before <= per_look * (seconds + 2)
    assert (looks() - before) < 160 * topics


def test_without_visitors_nothing_is_read_and_without_topics_there_is_help() -> None:
    with EmbeddedServer() as server, Gateway(server.url) as quiet, connect(server.url) as raw:
        page = quiet.client.get("/")
        assert page.status_code == 200
        assert "lisa send orders" in page.text
        assert f"{quiet.url}/v1/topics/orders/messages" in page.text
        assert "No consumers" in quiet.client.get("/consumers").text
        # Each read of data calls TIME; the read of the push targets every 2 s does not.
        before = raw.info("commandstats")["cmdstat_time"]["calls"]
        time.sleep(1.5)  # longer than data is cached
        assert raw.info("commandstats")["cmdstat_time"]["calls"] == before


def test_a_group_that_falls_behind_is_warned_of(site: Site) -> None:
    topic = new_topic("behind")
    head, minute = f"lisa:{{{topic}}}:", int(time.time()) // 60 * 60_000
    for i in (3, 2):
        fields: dict[Any, Any] = {
            "sent": 600,
            "acked@slow": 60 * (4 - i),
            "acked@fast": 10**6 * (4 - i),
        }
        site.raw.xadd(f"{head}history", fields, id=f"{minute - i * 60_000}-0")
    site.raw.hset(
        f"{head}stats", mapping={"sent": "600", "acked@slow": "120", "acked@fast": "2000000"}
    )
    with site.raw.pipeline() as pipe:
        for group in ("fast", "slow"):
            pipe.hset(f"{head}groups", group, "1")
            pipe.xgroup_create(f"{head}g:{group}:ready", group, id="0", mkstream=True)
        pipe.execute()
    site.producer.send_many(topic, range(3_000), delay=timedelta(minutes=20))
    page = site.gateway.client.get(f"/topics/{topic}?ahead=minutes").text
    assert "group slow" in page  # the one that has most before it
    assert "More messages fall due than were ever handled" in page
    assert "not cleared within these 60 minutes" in page or "cleared at about" in page
    other = site.gateway.client.get(f"/topics/{topic}?ahead=minutes&group=fast").text
    assert "group fast" in other


def test_an_id_from_the_future_hides_no_event(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = new_topic("future")
    site.raw.hset(f"lisa:{{{topic}}}:options", "journal", "1")
    born_ms = time.time_ns() // 1_000_000 + 3_600_000
    made = uuid.UUID(int=(born_ms << 80) | (7 << 76) | (2 << 62) | 1)
    monkeypatch.setattr(uuid_utils, "uuid7", lambda: made)
    message_id = new_id()
    assert id_time_ms(message_id) == born_ms
    site.producer.send(topic, 1, id=message_id, delay=timedelta(hours=1))
    page = site.gateway.client.get(f"/topics/{topic}/messages/{message_id}").text
    assert 'class="state sent"' in page


def test_more_than_one_topic_may_know_an_id(site: Site) -> None:
    first, second = new_topic("one"), new_topic("two")
    shared = f"shared-{first}"
    for topic in (first, second):
        site.producer.send(topic, 1, id=shared, delay=timedelta(hours=1))
    wait_until(lambda: second in site.gateway.client.get("/search", params={"q": shared}).text)
    found = site.gateway.client.get("/search", params={"q": shared})
    assert f"/topics/{first}/messages/{shared}" in found.text
    only = site.gateway.client.get("/search", params={"q": shared, "topic": first})
    assert (only.status_code, only.headers["location"]) == (
        303,
        f"/topics/{first}/messages/{shared}",
    )
