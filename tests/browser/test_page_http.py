"""The page over plain HTTP: access, forms, caching and cost."""

import base64
import concurrent.futures
import html
import json
import re
import time
import uuid
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urljoin, urlsplit

import httpx
import msgspec
import pytest
import uuid_utils

from lisa import Consumer
from lisa.core.model.envelope import id_time_ms, new_id
from lisa.core.store import presence
from lisa.embedded import EmbeddedServer
from lisa.gateway.access import Access, Scope, Token
from lisa.gateway.page import sessions
from lisa.gateway.page.rendering import link
from tests.browser.conftest import Site, Visitor, key_in, now_ms
from tests.gateways import NO_TLS, Gateway, declared_topic, new_topic
from tests.servers import connect, open_store, wait_until

HOUR = timedelta(hours=1)


def test_pages_hold_no_foreign_content_and_no_inline_script(site: Site) -> None:
    topic = new_topic()
    site.producer.send(topic, {"a": 1}, delay=HOUR)
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
    # An unchanged page is not sent again.
    client = site.gateway.client
    tag = {"If-None-Match": client.get("/search").headers["etag"]}
    again = client.get("/search", headers=tag)
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/search?q=none-such", headers=tag).status_code == 200


def test_without_actions_the_page_only_shows(site: Site) -> None:
    topic = new_topic()
    message_id = site.producer.send(topic, 1, delay=HOUR)
    with Gateway(site.server.url) as plain, Visitor(plain.url) as client:
        assert 'method="post"' not in client.page(f"/topics/{topic}/messages/{message_id}")
        assert not client.cookies
        assert "--allow-actions" in client.get(f"/topics/{topic}/schedule/edit?name=daily").text
        answer = client.act(topic, "cancel", id=message_id, key="0" * 64)
        assert answer.status_code == 403
        assert "--allow-actions" in answer.text
    assert site.message(topic, message_id).state == "waiting"


def test_a_form_needs_the_key_of_its_own_session(site: Site, visitor: Visitor) -> None:
    topic = new_topic()
    site.producer.send(topic, 1, delay=HOUR)
    act, path = f"/topics/{topic}/act", f"/topics/{topic}"
    with Visitor(site.url) as other, Visitor(site.url) as stranger:
        key, foreign = visitor.key(topic), other.key(topic)
        assert key != foreign
        for wrong in ({}, {"key": ""}, {"key": foreign}, {"key": "0" * 64}, {"key": "é"}):
            assert visitor.post(act, data={"do": "pause", **wrong}).status_code == 403
        assert stranger.act(topic, "pause", key=key).status_code == 403
    assert visitor.get(act).status_code == 405
    form = {"do": "pause", "key": key, "back": path}
    evil = visitor.post(act, data=form, headers={"Origin": "http://evil"})
    assert evil.status_code == 403
    assert site.raw.hget(f"lisa:{{{topic}}}:options", "paused") is None
    assert visitor.did(topic, "pause", **form) == f"{path}?did=paused"
    assert site.raw.hget(f"lisa:{{{topic}}}:options", "paused") == b"1"


def test_invalid_forms_are_distinguished_from_faults(site: Site, visitor: Visitor) -> None:
    topic = new_topic()
    message_id = site.producer.send(topic, 1, delay=HOUR)
    key = visitor.key(topic)
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
        answer = visitor.act(topic, **{"key": key, **data})
        assert 400 <= answer.status_code < 500, (data, answer.status_code)
    raw = visitor.post(f"/topics/{topic}/act", content=b"key=%ff\xff")
    assert raw.status_code in (400, 403)


def test_a_confirmation_applies_to_the_counted_messages(site: Site, visitor: Visitor) -> None:
    topic = new_topic("asked")
    site.kill(topic, "before", 1, "no")
    key = visitor.key(topic)
    none = visitor.act(topic, "purge", key=key)
    assert "Purge 0 messages?" in none.text
    assert "disabled" in none.text
    asked = visitor.act(topic, "purge_all", key=key).text
    assert "Purge 1 message?" in asked
    fields = dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', asked))
    site.kill(topic, "meanwhile", 1, "no")
    assert visitor.did(topic, **fields) == "/?did=purged&n=1"
    assert site.garbage(topic) == ["meanwhile"]


def test_one_hostile_body_does_not_hide_the_rest(site: Site) -> None:
    topic = new_topic("nested")
    site.kill(topic, "plain", "easy to read", "no")
    site.producer.send(topic, msgspec.Raw(b"[" * 1_900 + b"]" * 1_900), id="deep")
    with Consumer(site.server.url) as consumer:  # which cannot read it
        assert consumer.pull(topic, wait=timedelta(seconds=1)) == []
    assert len(site.garbage(topic)) == 2
    assert "easy to read" in site.page(f"/topics/{topic}/garbage")
    assert "[" * 1_900 in site.page(f"/topics/{topic}/messages/deep")


def test_a_topic_shows_its_ramp_and_a_skipped_message_its_state(site: Site) -> None:
    client, topic = site.gateway.client, declared_topic(site.gateway.client)
    options = {"late": "skip after 1h", "ramp": "1/h"}
    assert client.patch(f"/v1/topics/{topic}/options", json=options).status_code == 200
    for n in range(4):
        site.producer.send(topic, 1, id=f"backlog{n}", at_ms=now_ms() - 60_000)
    site.producer.send(topic, 1, id="old", at_ms=now_ms() - 7_200_000)
    wait_until(lambda: site.raw.zcard(f"lisa:{{{topic}}}:waiting") == 3)
    page = site.page(f"/topics/{topic}")
    (tile,) = re.findall(r"On the ramp.{,200}", page, re.DOTALL)
    assert "<dd>3 <small>ends in 3\xa0h<" in tile
    assert "skip after 1h" in page
    assert "skipped" in site.page(f"/topics/{topic}/messages/old")


def test_a_topic_shows_the_options_of_its_groups(site: Site) -> None:
    client, topic = site.gateway.client, declared_topic(site.gateway.client)
    path = f"/v1/topics/{topic}"
    (group,) = (one["name"] for one in client.get(f"{path}/groups").json()["groups"])
    own = {"key_rate": "10/m, burst 3"}
    assert client.patch(f"{path}/options", params={"group": group}, json=own).status_code == 200
    shown = f"<dt>key_rate@{group}</dt><dd><strong>10/m, burst 3</strong></dd>"
    assert shown in site.page(f"/topics/{topic}")


def test_a_retry_counts_from_its_first_due_time(site: Site) -> None:
    topic = new_topic()
    site.producer.send(topic, 1, id="m", at_ms=now_ms() - 600_000, retry="0s")
    with Consumer(site.server.url) as consumer:
        (delivery,) = consumer.pull(topic, wait=timedelta(seconds=10))
        delivery.retry()
    wait_until(lambda: ">10\xa0m</td>" in site.page(f"/topics/{topic}"))
    assert "the oldest for 10\xa0m" in site.page("/")
    message = site.page(f"/topics/{topic}/messages/m")
    assert re.search(r"<dt>First due</dt>.{,200}10 m( \d+ s)? ago", message, re.DOTALL), message


def test_a_filter_reads_a_limited_number_per_request(site: Site) -> None:
    topic = new_topic("many")
    site.kill(topic, "first", 1, "no")
    head = f"lisa:{{{topic}}}:g:lisa:"
    body: Any = site.raw.get(f"lisa:{{{topic}}}:body:first")
    ids = [f"x{i:04}" for i in range(6_000)]
    site.raw.zadd(head + "garbage", {one: 10**13 + i for i, one in enumerate(ids)})
    site.raw.mset({f"lisa:{{{topic}}}:body:{one}": body for one in ids})
    site.raw.hset(head + "reasons", ids[0], "the one")
    page = site.page(f"/topics/{topic}/garbage", reason="the one")
    assert "more messages follow" in page
    (address,) = re.findall(r'href="([^"]+)">Next', page)
    assert ids[0] in site.page(html.unescape(address))


def test_foreign_data_hides_no_page(site: Site) -> None:
    topic = new_topic("broken")
    site.producer.send(topic, 1, delay=HOUR)
    try:
        site.raw.hset(f"lisa:{{{topic}}}:stats", "foreign", "text")
        site.raw.zadd("lisa:topics", {"not a {topic}": 1})
        wait_until(lambda: topic in site.page("/"))
        for path in (f"/topics/{topic}", "/consumers", "/managers"):
            assert site.page(path)
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
    site.producer.send(topic, 1, id="m", delay=HOUR)
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
    with Visitor(guarded.url) as client:
        asked = client.get("/consumers?topic=a")
        assert asked.status_code == 303
        assert asked.headers["location"] == "/login?next=%2Fconsumers%3Ftopic%3Da"
        assert client.log_in("wrong-wrong-wrong-wrong").status_code == 403
        entered = client.log_in("everything-everything", "/consumers")
        assert (entered.status_code, entered.headers["location"]) == (303, "/consumers")
        cookie = entered.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "everything" not in cookie
        assert "redis://" in client.page("/managers")
        assert client.post("/logout").status_code == 303
        assert client.get("/").status_code == 303
        # A login leads back to any id, and to no other site.
        path = link("topics", "t", "messages", "50%25 a?b#c")
        asked = client.get(path)
        back = parse_qs(urlsplit(asked.headers["location"]).query)["next"][0]
        assert client.log_in("everything-everything", back).headers["location"] == path
        for foreign in ("//evil.example", "/\\evil.example", "https://evil.example", "x"):
            entered = client.log_in("everything-everything", foreign)
            assert entered.headers["location"] == "/"
        client.cookies.clear()
        # An unknown address, a live page whose session has ended, and programs.
        asked = client.get("/none?x=1", headers={"Accept": "text/html"})
        assert asked.headers["location"] == "/login?next=%2Fnone%3Fx%3D1"
        live = {"HX-Request": "true", "HX-Current-URL": f"{guarded.url}/consumers"}
        ended = client.get("/consumers", headers=live)
        assert (ended.status_code, ended.headers["hx-redirect"]) == (
            401,
            "/login?next=%2Fconsumers",
        )
        for token, codes in (("everything-everything", {200}), ("no" * 10, {303, 401})):
            bearer = {"Authorization": f"Bearer {token}"}
            assert client.get("/", headers=bearer).status_code in codes


@pytest.mark.parametrize("is_removed", [False, True], ids=["passed on", "removed"])
def test_below_a_path_of_a_proxy_no_address_leads_out(site: Site, *, is_removed: bool) -> None:
    """Whether the proxy passes the base path on or removes it; seen as a browser sees it."""

    def proxied(request: httpx.Request) -> None:
        assert request.url.raw_path.startswith(b"/lisa/"), request.url
        if is_removed:
            request.url = request.url.copy_with(
                raw_path=request.url.raw_path.removeprefix(b"/lisa")
            )

    topic, message_id = new_topic(), "shop/42 50%25"
    env = {"LISA_GATEWAY_SERVER__BASE_PATH": "/lisa", "LISA_GATEWAY_SERVER__TOKEN": "t" * 32}
    with (
        Gateway(site.server.url, "--allow-actions", env=env) as gateway,
        Visitor(gateway.url) as it,
    ):
        assert gateway.client.get("/healthz").status_code == 200
        it.event_hooks = {"request": [proxied]}
        site.producer.send(topic, {"a": 1}, id=message_id, delay=HOUR)
        asked = it.get("/lisa/consumers")
        assert asked.headers["location"] == "/lisa/login?next=%2Fconsumers"
        entered = it.post("/lisa/login", data={"token": "t" * 32, "next": "/consumers"})
        assert entered.headers["location"] == "/lisa/consumers"
        assert "; Path=/lisa;" in entered.headers["set-cookie"]
        start = link("lisa", "topics", topic, "messages", message_id)
        ahead = ["/lisa/", "/lisa/v1/docs", start, f"/lisa/topics/{topic}"]
        for page in ahead:  # grows
            answer = it.get(page)
            assert answer.status_code in (200, 303), page
            if "html" not in answer.headers.get("content-type", ""):
                continue
            found = re.findall(r'\s(?:href|src|action|hx-get)="([^"]*)"', answer.text)
            for one in {urljoin(page, html.unescape(one)).partition("#")[0] for one in found}:
                assert one.startswith("/lisa/"), (page, one)
                if one not in ahead and "?" not in one and not one.endswith(("/act", "/logout")):
                    ahead.append(one)
        assert len(ahead) > 15, ahead


def test_a_logout_ends_the_session_at_every_gateway(guarded: Gateway, site: Site) -> None:
    def cookie(client: Visitor) -> dict[str, str]:
        client.log_in("everything-everything")
        return {"Cookie": f"{sessions.COOKIE}={client.cookies[sessions.COOKIE]}"}

    with Visitor(guarded.url) as client:
        stolen, other = cookie(client), cookie(client)
        client.cookies.clear()
        assert client.get("/", headers=stolen).status_code == 200
        assert client.post("/logout", headers=stolen).status_code == 303
        again = client.get("/consumers", headers=stolen)
        assert (again.status_code, again.headers["location"]) == (303, "/login?next=%2Fconsumers")
        assert client.get("/", headers=other).status_code == 200
        ended = list(site.raw.scan_iter("lisa:logout:*"))
        assert ended
        assert all(0 < site.raw.pttl(key) <= sessions.LASTS_S * 1000 for key in ended)


def test_actions_and_refused_logins_are_audited(guarded: Gateway, site: Site) -> None:
    topic, since = new_topic("orders"), len(guarded.said)
    site.producer.send(topic, 1, delay="1h")
    with Visitor(guarded.url) as client:
        for _ in range(3):
            client.log_in("wrong-wrong-wrong-wrong")
        client.log_in("everything-everything")
        client.did(topic, "pause", back="/")

    def audited(text: str) -> list[str]:
        said = [one for one in guarded.said[since:] if "lisa.gateway.audit" in one]
        return [one for one in said if text in one]

    wait_until(lambda: bool(audited(topic)))
    (done,) = audited(topic)
    assert f"token 'all' from 127.0.0.1: paused topic='{topic}' session=" in done
    assert len(audited("refused")) <= 1  # the others are summarised ten seconds later
    refused = "login from 127.0.0.1 refused: the token is not valid"
    wait_until(lambda: any(one.endswith(refused) for one in guarded.said))
    assert not [one for one in guarded.said if "wrong-wrong" in one]


def test_a_cookie_cannot_be_forged(guarded: Gateway) -> None:
    with Visitor(guarded.url) as client:
        client.log_in("orders-orders-orders")
        payload, _, signature = client.cookies[sessions.COOKIE].partition(".")
        name = base64.urlsafe_b64encode(b'["all",9999999999,"x"]').decode().rstrip("=")
        forged = (f"{name}.{signature}", f"{payload}.{'0' * 64}", payload, "", ".", "a.b")
        client.cookies.clear()
        for value in (*forged, "x" * 5000):
            answer = client.get("/", headers={"Cookie": f"{sessions.COOKIE}={value}"})
            assert answer.status_code == 303, value


def test_relays_are_shown_to_operators(guarded: Gateway, site: Site) -> None:
    """Their errors and tables tell of an application's database."""
    store = open_store(site.server.url)
    record = presence.RelayPresence(name="r-1", table="sqlite:///x lisa_outbox", set_aside=7)
    try:
        with Visitor(guarded.url) as operator, Visitor(guarded.url) as other:
            operator.log_in("everything-everything")
            other.log_in("orders-orders-orders")
            assert "Relays" not in operator.page("/managers")
            store.drive(presence.announce_relay(store, record))
            wait_until(lambda: record.table in operator.page("/managers"))
            assert "Rows set aside" in operator.page("/")
            for path in ("/", "/managers"):
                assert record.table not in other.page(path)
    finally:
        store.drive(presence.leave_relay(store, record.name))


def test_a_session_ends_with_its_time_and_with_its_token() -> None:
    token = Token.of("a", "secret-secret-secret", [Scope.OPERATE])
    cookie = sessions.issue(token, 1_000)
    session = sessions.read(Access([token]), cookie, 1_000)
    assert session is not None
    assert session.token == token
    changed = Token.of("a", "another-another-another", [Scope.OPERATE])
    assert sessions.read(Access([changed]), cookie, 1_000) is None
    assert sessions.read(Access([]), cookie, 1_000) is None
    assert sessions.read(Access([token]), cookie, 1_000 * (sessions.LASTS_S + 3)) is None


def test_a_token_sees_and_touches_its_own_topics_only(guarded: Gateway, site: Site) -> None:
    mine, other = new_topic("orders.a"), new_topic("mail")
    for topic in (mine, other):
        site.producer.send(topic, {"a": f"text of {topic}"}, id=f"in-{topic}", delay=HOUR)
    with Visitor(guarded.url) as client:
        client.log_in("orders-orders-orders")
        wait_until(lambda: mine in client.page("/"))
        assert other not in client.page("/")
        for path in ("", "/garbage", "/messages", f"/messages/in-{other}"):
            assert client.get(f"/topics/{other}{path}").status_code == 403
        assert client.get(f"/consumers?topic={other}&name=x").status_code == 403
        assert "redis://" not in client.page("/managers")
        assert "No topic has a message" in client.page("/search", q=f"in-{other}")
        for query in ({"q": "in-"}, {"q": "text of", "in": "text"}):
            found = client.page("/search", **query)
            assert f"in-{mine}" in found
            assert f"in-{other}" not in found
            assert f"in-{other}" not in client.get("/search", params={**query, "topic": other}).text
        page = client.page(f"/topics/{mine}/messages/in-{mine}")
        assert "Cancel" in page  # the scope produce is enough
        assert "Pause" not in client.page(f"/topics/{mine}")
        key = key_in(page)
        for topic, verb in ((mine, "pause"), (mine, "purge_all"), (other, "cancel")):
            assert client.act(topic, verb, key=key).status_code == 403


def test_a_crowd_of_viewers_costs_the_server_one_reader(site: Site) -> None:
    def looks() -> int:
        stats = site.raw.info("commandstats")
        return int(stats["cmdstat_zcard"]["calls"])

    for i in range(5):
        site.producer.send(new_topic(f"crowd-{i}"), 1, delay=HOUR)
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
    head, minute = f"lisa:{{{topic}}}:", now_ms() // 60_000 * 60_000
    for ago, n in ((3, 1), (2, 2)):
        fields: dict[Any, Any] = {"sent": 600, "acked@slow": 60 * n, "acked@fast": 10**6 * n}
        site.raw.xadd(f"{head}history", fields, id=f"{minute - ago * 60_000}-0")
    site.raw.hset(f"{head}stats", mapping=fields)
    with site.raw.pipeline() as pipe:
        for group in ("fast", "slow"):
            pipe.hset(f"{head}groups", group, "1")
            pipe.xgroup_create(f"{head}g:{group}:ready", group, id="0", mkstream=True)
        pipe.execute()
    site.producer.send_many(topic, range(3_000), delay=timedelta(minutes=20))
    page = site.page(f"/topics/{topic}", ahead="minutes")
    assert "group slow" in page  # the one that has most before it
    assert "More messages fall due than were ever handled" in page
    assert "not cleared within these 60 minutes" in page or "cleared at about" in page
    assert "group fast" in site.page(f"/topics/{topic}", ahead="minutes", group="fast")


def test_an_id_from_the_future_hides_no_event(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = new_topic("future")
    site.option(topic, "journal", "1")
    born_ms = now_ms() + 3_600_000
    made = uuid.UUID(int=(born_ms << 80) | (7 << 76) | (2 << 62) | 1)
    monkeypatch.setattr(uuid_utils, "uuid7", lambda: made)
    message_id = new_id()
    assert id_time_ms(message_id) == born_ms
    site.producer.send(topic, 1, id=message_id, delay=HOUR)
    assert 'class="state sent"' in site.page(f"/topics/{topic}/messages/{message_id}")
