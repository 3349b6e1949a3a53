"""The pages of schedules: what they show, and what they change."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lisa import ScheduleInfo
from lisa.core.model.recurring.define import define
from lisa.gateway.page.schedule_forms import exact_duration, fields_of, options_of
from lisa.gateway.page.schedules import PER_PAGE
from tests.browser.conftest import Site, browser_of, key_in
from tests.gateways import Gateway, new_topic
from tests.servers import wait_until

DAILY: dict[str, Any] = {"cron": "0 9 * * 1-5", "tz": "Europe/Berlin"}
MINUTE_MS = 60_000


@pytest.fixture
def topic(site: Site) -> str:
    """A topic with the schedule `daily`."""
    name = new_topic("reports")
    site.producer.schedule("daily", topic=name, body={"kind": "daily"}, **DAILY)
    return name


@pytest.fixture
def client(site: Site) -> Iterator[httpx.Client]:
    with browser_of(site.url) as client:
        yield client


def stored(site: Site, topic: str, name: str = "daily") -> ScheduleInfo:
    found = site.producer.get_schedule(topic, name)
    assert found is not None
    return found


def act(client: httpx.Client, topic: str, verb: str, **fields: str) -> httpx.Response:
    """Post a form of the schedule `daily`, and follow the redirect."""
    back = f"/topics/{topic}/schedule?name=daily"
    key = key_in(client.get(f"/topics/{topic}").text)
    data = {"key": key, "back": back, "schedule": "daily", "do": verb, **fields}
    return client.post(f"/topics/{topic}/act", data=data, follow_redirects=True)


def form_of(client: httpx.Client, path: str) -> dict[str, str]:
    """The fields of a page's form for schedules, as a browser submits them."""
    page = client.get(path).text
    form = page[page.index('<form class="fields"') :]
    fields = {}
    for tag in re.findall(r"<input [^>]*>", form):
        given = dict(re.findall(r'([a-z]+)="([^"]*)"', tag))
        if given.get("type") != "checkbox" or " checked" in tag:
            fields[given["name"]] = html.unescape(given.get("value", ""))
    for name, options in re.findall(r'<select id="(\w+)".*?>(.*?)</select>', form, re.DOTALL):
        (fields[name],) = re.findall(r'value="(\w+)" selected', options)
    if body := re.search(r"<textarea [^>]*>\n(.*?)</textarea>", form, re.DOTALL):
        fields["body"] = html.unescape(body[1]).replace("\n", "\r\n")  # as browsers send it
    return fields


def test_the_list_shows_rule_zone_and_next_tick(
    site: Site, client: httpx.Client, topic: str
) -> None:
    site.producer.schedule("every", topic=topic, body=1, every="90m")
    site.producer.pause_schedule(topic, "every")
    page = client.get(f"/topics/{topic}/schedules").text
    rows = re.findall(r"<tr>.*?</tr>", page, re.DOTALL)[1:]
    assert [re.search(r">([\w-]+)</a>", row)[1] for row in rows] == ["daily", "every"]  # type: ignore[index]
    assert "0 9 * * 1-5" in rows[0]
    assert "Europe/Berlin" in rows[0]
    assert re.search(r"<time>\d{4}-\d\d-\d\d 0[78]:00:00</time> <small>in ", rows[0])
    assert "every 1h 30m" in rows[1]
    assert "paused" in rows[1]
    assert f"/topics/{topic}/schedules" in client.get(f"/topics/{topic}").text


def test_a_topic_without_schedules_and_an_unknown_one(site: Site, client: httpx.Client) -> None:
    topic = new_topic()
    site.producer.send(topic, 1, delay="1h")
    assert "No schedules." in client.get(f"/topics/{topic}/schedules").text
    assert client.get("/topics/none-such/schedules").status_code == 404
    unknown = client.get(f"/topics/{topic}/schedule?name=none")
    assert (unknown.status_code, "has no schedule" in unknown.text) == (404, True)
    assert client.get(f"/topics/{topic}/schedule").status_code == 400


def test_many_schedules_are_shown_page_by_page(site: Site, client: httpx.Client) -> None:
    topic = new_topic()
    site.producer.schedule("s0", topic=topic, body="x" * 100, **DAILY)
    head = f"lisa:{{{topic}}}:"
    record: Any = site.raw.hget(head + "schedules", "s0")
    names = {f"s{i}" for i in range(3 * PER_PAGE)}
    site.raw.hset(head + "schedules", mapping=dict.fromkeys(names, record))
    seen: set[str] = set()
    path = f"/topics/{topic}/schedules"
    while path:
        page = client.get(path).text
        shown = re.findall(r'schedule\?name=(\w+)"', page)
        assert 0 < len(shown) < 2 * PER_PAGE
        seen.update(shown)
        following = re.search(r'<a href="([^"]*cursor=[^"]*)">Next', page)
        path = html.unescape(following[1]) if following else ""
    assert seen == names


def test_a_schedule_shows_its_next_ticks_and_the_outcome_of_the_latest(
    site: Site, client: httpx.Client
) -> None:
    topic = new_topic()
    site.producer.schedule("s", topic=topic, body={"a": "${count}"}, every="1s", template=True)

    def latest() -> list[str]:
        page = client.get(f"/topics/{topic}/schedule?name=s").text
        table = page[page.index("Latest ticks") :]
        return re.findall(r'class="state \w+" href="/topics/[^"]*/s%40\d+">([a-z ]+)<', table)

    path = f"/topics/{topic}/schedule?name=s"
    wait_until(lambda: latest()[:2] == ["waiting"] * 2)  # there is no group
    page = client.get(path).text
    ticks = page[page.index("Next ticks") : page.index("Latest ticks")]
    assert len(re.findall(r"<tr><th scope=.row.", ticks)) == 10
    assert "${count}" in page
    site.producer.pause_schedule(topic, "s")
    page = client.get(path).text
    assert "The schedule is paused." in page
    listed = client.get(f"/topics/{topic}/schedules").text
    assert re.search(r'class="name wide"><time>\d{4}', listed)


def test_a_schedule_is_paused_resumed_run_and_removed(
    site: Site, client: httpx.Client, topic: str
) -> None:
    assert "is paused" in act(client, topic, "schedule_pause").text
    assert stored(site, topic).is_paused
    page = act(client, topic, "schedule_resume").text
    assert "continues with its next tick" in page
    assert not stored(site, topic).is_paused
    run = act(client, topic, "schedule_run")
    assert "due now, besides the ticks" in run.text
    assert re.fullmatch(
        rf"/topics/{topic}/messages/daily%40\d+", run.url.raw_path.decode().partition("?")[0]
    )
    for verb in ("schedule_pause", "schedule_run", "schedule_backfill", "schedule_remove"):
        assert act(client, topic, verb, schedule="none").status_code == 404
    asked = act(client, topic, "schedule_remove").text
    assert "Remove schedule daily?" in asked
    assert stored(site, topic)
    done = act(client, topic, "schedule_remove", sure="yes")
    assert "The schedule is removed." in done.text
    assert done.url.path == f"/topics/{topic}/schedules"
    assert site.producer.get_schedule(topic, "daily") is None


def test_a_backfill_counts_first_and_then_creates(
    site: Site, client: httpx.Client, topic: str
) -> None:
    span = {"from": "2026-03-26T09:00", "to": "2026-03-30T09:00"}
    asked = act(client, topic, "schedule_backfill", **span).text
    assert "Create 3 messages of daily?" in asked  # over a weekend and a change of the clock
    done = act(client, topic, "schedule_backfill", sure="yes", **span).text
    assert "Messages created: 3 of 3." in done
    again = act(client, topic, "schedule_backfill", sure="yes", **span).text
    assert "Messages created: 0 of 3. The others existed already." in again
    for no_time in ("then", "0001-01-01T00:00"):
        bad = act(client, topic, "schedule_backfill", **{**span, "from": no_time})
        assert (bad.status_code, "is not a time" in bad.text) == (400, True)
    bad = act(client, topic, "schedule_backfill", **{"from": span["to"], "to": span["from"]})
    assert (bad.status_code, "ends before it begins" in bad.text) == (400, True)
    site.producer.schedule("fast", topic=topic, body=1, every="1s", start="2026-01-01T00:00")
    many = act(client, topic, "schedule_backfill", schedule="fast", **span)
    assert (many.status_code, "more than 10,000 ticks" in many.text) == (400, True)


def test_a_new_schedule_is_created_once(site: Site, client: httpx.Client, topic: str) -> None:
    fields = form_of(client, f"/topics/{topic}/schedule/edit")
    fields |= {"schedule": "new", "every": "10m", "body": '{"a":\r\n 1}', "headers": '{"k": "v"}'}
    fields |= {"catch_up": "all", "max": "7", "retry": "none", "template": "yes"}
    done = act(client, topic, "schedule_save", **fields)
    assert (done.status_code, "Saved." in done.text) == (200, True)
    made = stored(site, topic, "new").definition
    assert made == define(
        {"a": 1},
        {"every": "10m", "headers": {"k": "v"}, "catch_up": "all(max=7)", "retry": "",
         "template": True},
    )  # fmt: skip
    again = act(client, topic, "schedule_save", **fields)
    assert again.status_code == 409
    assert "has version 1, not 0" in again.text


def test_a_wrong_form_is_shown_again_with_its_values(
    site: Site, client: httpx.Client, topic: str
) -> None:
    path = f"/topics/{topic}/schedule/edit?name=daily"
    before = stored(site, topic)
    good = form_of(client, path)
    for name, value, said in (
        ("cron", "61 * * * *", "minute &#39;61&#39;"),
        ("tz", "Europe/Berlim", "Europe/Berlim"),
        ("headers", "[]", "JSON object with text values"),
        ("count", "many", "count is a number"),
        ("body", "{", "is not JSON"),
        ("version", "", "reload the page"),
    ):
        shown = act(client, topic, "schedule_save", **{**good, name: value})
        assert shown.status_code == 400
        assert "Nothing was changed" in shown.text
        assert said in shown.text
        assert f'value="{value}"' in shown.text or value in ("{", "")
    assert stored(site, topic) == before


def test_an_edit_changes_the_version_that_was_shown(
    site: Site, client: httpx.Client, topic: str
) -> None:
    path = f"/topics/{topic}/schedule/edit?name=daily"
    fields = form_of(client, path)
    same = act(client, topic, "schedule_save", **fields)
    assert "Nothing was changed" in same.text
    assert stored(site, topic).version == 1
    assert "Saved." in act(client, topic, "schedule_save", **{**fields, "cron": "0 8 * * *"}).text
    assert stored(site, topic).definition.cron == "0 8 * * *"
    late = act(client, topic, "schedule_save", **{**fields, "cron": "0 7 * * *"})
    assert late.status_code == 409
    assert "has version 2, not 1" in late.text
    assert stored(site, topic).definition.cron == "0 8 * * *"


def test_an_edit_keeps_a_body_that_no_form_can_hold(site: Site, client: httpx.Client) -> None:
    topic = new_topic()
    for name, body in (("bytes", b"\x00\xff"), ("long", {"a": "x" * 20_000})):
        site.producer.schedule(name, topic=topic, body=body, every="1h")
        fields = form_of(client, f"/topics/{topic}/schedule/edit?name={name}")
        assert "body" not in fields
        before = stored(site, topic, name).definition
        act(client, topic, "schedule_save", **{**fields, "jitter": "1m"})
        after = stored(site, topic, name).definition
        assert (after.body, after.kind) == (before.body, before.kind)
        assert after.jitter_ms == MINUTE_MS


DEFINITIONS: list[tuple[object, dict[str, Any]]] = [
    ({"b": [1, None]}, {"cron": "*/5 * * * *", "dst": "skip", "count": 3, "jitter": "90s"}),
    ("two\nlines", {"every": "36h", "tz": "+05:30", "start": "2026-03-29T02:30", "ttl": "1001ms"}),
    ("", {"every": "1s", "until": "2030-01-01T00:00", "overlap": "queue_one", "retry": "1s~0.5"}),
    (None, {"every": "1d", "catch_up": "all(max=3)", "max_late": "61m", "retry": ""}),
    (1, {"every": "1h", "late": "collapse after 1d2h3s"}),
    (1, {"every": "1h", "late": "run"}),
]


def test_a_form_keeps_every_definition() -> None:
    for body, options in DEFINITIONS:
        definition = define(body, options)  # type: ignore[arg-type]
        given = options_of(fields_of(definition), definition)
        assert define(given.pop("body"), given) == definition  # type: ignore[arg-type]
    durations = {None: "", 0: "", 90_000: "90s", 3_600_000: "1h", 86_400_000: "1d", 1_001: "1001ms"}
    assert {ms: exact_duration(ms) for ms in durations} == durations


TOKENS = """
tokens:
  - {name: reader, token: reader-reader-reader, scopes: [read]}
  - {name: maker, token: maker-maker-maker-1, scopes: [read, produce]}
"""


def test_reading_allows_no_change(site: Site, topic: str, tmp_path: Path) -> None:
    (tmp_path / "tokens.yml").write_text(TOKENS, encoding="utf-8")
    arguments = ("--tokens-file", str(tmp_path / "tokens.yml"), "--allow-actions")
    with Gateway(site.server.url, *arguments) as gateway:
        for token, may in (("reader-reader-reader", False), ("maker-maker-maker-1", True)):
            with browser_of(gateway.url) as client:
                client.post("/login", data={"token": token, "next": "/"})
                page = client.get(f"/topics/{topic}/schedule?name=daily").text
                assert ("Remove" in page) == may
                listed = client.get(f"/topics/{topic}/schedules").text
                assert ("New schedule" in listed) == may
                edit = client.get(f"/topics/{topic}/schedule/edit?name=daily")
                assert edit.status_code == (200 if may else 403)
                assert ("does not allow scope produce" in edit.text) != may
                form = client.get(f"/topics/{topic}/schedule?name=daily").text
                key = key_in(form) if may else "0" * 64
                data = {"key": key, "do": "schedule_pause", "schedule": "daily", "back": "/"}
                done = client.post(f"/topics/{topic}/act", data=data)
                assert done.status_code == (303 if may else 403)
        assert stored(site, topic).is_paused
        assert any("schedule='daily'" in one for one in gateway.said)
