"""The pages of schedules: what they show, and what they change."""

import html
import json
import re
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from lisa import Manager, Producer, ScheduleInfo
from lisa.cli.main import main
from lisa.core.model.recurring.definition import define
from lisa.embedded import EmbeddedServer
from lisa.gateway.page.schedules import PER_PAGE, exact_duration, fields_of, options_of
from tests.browser.conftest import Site, Visitor
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


def stored(site: Site, topic: str, name: str = "daily") -> ScheduleInfo:
    found = site.producer.get_schedule(topic, name)
    assert found is not None
    return found


def act(visitor: Visitor, topic: str, verb: str, **fields: str) -> httpx.Response:
    """Post a form of the schedule `daily`, and follow the redirect."""
    back = f"/topics/{topic}/schedule?name=daily"
    done = visitor.act(topic, verb, **{"schedule": "daily", "back": back, **fields})
    return visitor.get(done.headers["location"]) if done.status_code == 303 else done


def refused(answer: httpx.Response, code: int, words: str) -> None:
    """Assert that an action was refused for this reason."""
    assert (answer.status_code, words in answer.text) == (code, True), answer.text


def form_of(visitor: Visitor, path: str) -> dict[str, str]:
    """The fields of a page's form for schedules, as a browser submits them."""
    page = visitor.page(path)
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


def test_the_list_shows_rule_zone_and_next_tick(site: Site, visitor: Visitor, topic: str) -> None:
    site.producer.schedule("every", topic=topic, body=1, every="90m")
    site.producer.pause_schedule(topic, "every")
    page = visitor.page(f"/topics/{topic}/schedules")
    first, second = re.findall(r"<tr>.*?</tr>", page, re.DOTALL)[1:]
    assert re.search(r">daily</a>", first)
    assert "0 9 * * 1-5" in first
    assert "Europe/Berlin" in first
    assert re.search(r"<time>\d{4}-\d\d-\d\d 0[78]:00:00</time> <small>in ", first)
    assert re.search(r">every</a>", second)
    assert "every 1h 30m" in second
    assert "paused" in second
    assert f"/topics/{topic}/schedules" in visitor.page(f"/topics/{topic}")
    # Without schedules, and with an unknown one.
    other = new_topic()
    site.producer.send(other, 1, delay="1h")
    assert "No schedules." in visitor.page(f"/topics/{other}/schedules")
    assert visitor.get("/topics/none-such/schedules").status_code == 404
    refused(visitor.get(f"/topics/{other}/schedule?name=none"), 404, "has no schedule")
    assert visitor.get(f"/topics/{other}/schedule").status_code == 400


def test_many_schedules_are_shown_page_by_page(site: Site, visitor: Visitor) -> None:
    topic = new_topic()
    site.producer.schedule("s0", topic=topic, body="x" * 100, **DAILY)
    head = f"lisa:{{{topic}}}:"
    record: Any = site.raw.hget(head + "schedules", "s0")
    names = {f"s{i}" for i in range(3 * PER_PAGE)}
    site.raw.hset(head + "schedules", mapping=dict.fromkeys(names, record))
    seen: set[str] = set()
    path = f"/topics/{topic}/schedules"
    while path:
        page = visitor.page(path)
        shown = re.findall(r'schedule\?name=(\w+)"', page)
        assert 0 < len(shown) < 2 * PER_PAGE
        seen.update(shown)
        following = re.search(r'<a href="([^"]*cursor=[^"]*)">Next', page)
        path = html.unescape(following[1]) if following else ""
    assert seen == names


def test_a_schedule_shows_its_next_ticks_and_the_outcome_of_the_latest(
    site: Site, visitor: Visitor
) -> None:
    topic = new_topic()
    site.producer.schedule("s", topic=topic, body={"a": "${count}"}, every="1s", template=True)
    path = f"/topics/{topic}/schedule?name=s"

    def latest() -> list[str]:
        table = visitor.page(path).partition("Latest ticks")[2]
        return re.findall(r'class="state \w+" href="/topics/[^"]*/s%40\d+">([a-z ]+)<', table)

    wait_until(lambda: latest()[:2] == ["waiting"] * 2)  # there is no group
    page = visitor.page(path)
    ticks = page[page.index("Next ticks") : page.index("Latest ticks")]
    assert len(re.findall(r"<tr><th scope=.row.", ticks)) == 10
    assert "${count}" in page
    site.producer.pause_schedule(topic, "s")
    assert "The schedule is paused." in visitor.page(path)
    listed = visitor.page(f"/topics/{topic}/schedules")
    assert re.search(r'class="name wide"><time>\d{4}', listed)  # its last tick


def test_a_schedule_is_paused_resumed_run_and_removed(
    site: Site, visitor: Visitor, topic: str
) -> None:
    assert "is paused" in act(visitor, topic, "schedule_pause").text
    assert stored(site, topic).is_paused
    assert "continues with its next tick" in act(visitor, topic, "schedule_resume").text
    assert not stored(site, topic).is_paused
    run = act(visitor, topic, "schedule_run")
    assert "due now, besides the ticks" in run.text
    path = run.url.raw_path.decode().partition("?")[0]
    assert re.fullmatch(rf"/topics/{topic}/messages/daily%40\d+", path)
    for verb in ("schedule_pause", "schedule_run", "schedule_backfill", "schedule_remove"):
        assert act(visitor, topic, verb, schedule="none").status_code == 404
    assert "Remove schedule daily?" in act(visitor, topic, "schedule_remove").text
    assert stored(site, topic)
    done = act(visitor, topic, "schedule_remove", sure="yes")
    assert "The schedule is removed." in done.text
    assert done.url.path == f"/topics/{topic}/schedules"
    assert site.producer.get_schedule(topic, "daily") is None


def test_a_backfill_counts_first_and_then_creates(site: Site, visitor: Visitor, topic: str) -> None:
    span = {"from": "2026-03-26T09:00", "to": "2026-03-30T09:00"}

    def backfill(**fields: str) -> httpx.Response:
        return act(visitor, topic, "schedule_backfill", **{**span, **fields})

    # Over a weekend and a change of the clock.
    assert "Create 3 messages of daily?" in backfill().text
    assert "Messages created: 3 of 3." in backfill(sure="yes").text
    again = backfill(sure="yes").text
    assert "Messages created: 0 of 3. The others existed already." in again
    for no_time in ("then", "0001-01-01T00:00"):
        refused(backfill(**{"from": no_time}), 400, "is not a time")
    refused(backfill(**{"from": span["to"], "to": span["from"]}), 400, "ends before it begins")
    site.producer.schedule("fast", topic=topic, body=1, every="1s", start="2026-01-01T00:00")
    refused(backfill(schedule="fast"), 400, "more than 10,000 ticks")


def test_a_new_schedule_is_created_once(site: Site, visitor: Visitor, topic: str) -> None:
    fields = form_of(visitor, f"/topics/{topic}/schedule/edit")
    fields |= {"schedule": "new", "every": "10m", "body": '{"a":\r\n 1}', "headers": '{"k": "v"}'}
    fields |= {"catch_up": "all", "max": "7", "retry": "none", "template": "yes"}
    assert "Saved." in act(visitor, topic, "schedule_save", **fields).text
    options: Any = {"every": "10m", "headers": {"k": "v"}, "retry": "", "template": True}
    options["catch_up"] = "all(max=7)"
    made = stored(site, topic, "new").definition
    assert made == define({"a": 1}, options)
    refused(act(visitor, topic, "schedule_save", **fields), 409, "has version 1, not 0")


def test_an_edit_changes_the_version_that_was_shown(
    site: Site, visitor: Visitor, topic: str
) -> None:
    """A wrong form is shown again with its values."""
    before = stored(site, topic)
    good = form_of(visitor, f"/topics/{topic}/schedule/edit?name=daily")

    def save(**changes: str) -> httpx.Response:
        return act(visitor, topic, "schedule_save", **{**good, **changes})

    for name, value, said in (
        ("cron", "61 * * * *", "minute &#39;61&#39;"),
        ("tz", "Europe/Berlim", "Europe/Berlim"),
        ("headers", "[]", "JSON object with text values"),
        ("count", "many", "count is a number"),
        ("body", "{", "is not JSON"),
        ("version", "", "reload the page"),
    ):
        shown = save(**{name: value})
        refused(shown, 400, said)
        assert "Nothing was changed" in shown.text
        assert f'value="{value}"' in shown.text or value in ("{", "")
    assert "Nothing was changed" in save().text
    assert stored(site, topic) == before
    assert "Saved." in save(cron="0 8 * * *").text
    refused(save(cron="0 7 * * *"), 409, "has version 2, not 1")
    assert stored(site, topic).definition.cron == "0 8 * * *"


def test_an_edit_keeps_a_body_that_no_form_can_hold(site: Site, visitor: Visitor) -> None:
    topic = new_topic()
    for name, body in (("bytes", b"\x00\xff"), ("long", {"a": "x" * 20_000})):
        site.producer.schedule(name, topic=topic, body=body, every="1h")
        fields = form_of(visitor, f"/topics/{topic}/schedule/edit?name={name}")
        assert "body" not in fields
        before = stored(site, topic, name).definition
        act(visitor, topic, "schedule_save", **{**fields, "jitter": "1m"})
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
    (1, {"every": "1h", "key": " order/42 "}),
    (1, {"every": "1h", "cost": 5, "slack": "90s"}),
    (1, {"every": "1h", "slack": "0s"}),
]


def test_a_form_keeps_every_definition() -> None:
    for body, options in DEFINITIONS:
        definition = define(body, options)  # type: ignore[arg-type]
        given = options_of(fields_of(definition), definition)
        assert define(given.pop("body"), given) == definition  # type: ignore[arg-type]
    durations = {None: "", 0: "", 90_000: "90s", 3_600_000: "1h", 86_400_000: "1d", 1_001: "1001ms"}
    assert {ms: exact_duration(ms) for ms in durations} == durations


def test_reading_allows_no_change(site: Site, guarded: Gateway, topic: str) -> None:
    for token, may in (("reader-reader-reader", False), ("everything-everything", True)):
        with Visitor(guarded.url) as visitor:
            visitor.log_in(token)
            page = visitor.page(f"/topics/{topic}/schedule?name=daily")
            assert ("Remove" in page) == may
            assert ("New schedule" in visitor.page(f"/topics/{topic}/schedules")) == may
            edit = visitor.get(f"/topics/{topic}/schedule/edit?name=daily")
            assert edit.status_code == (200 if may else 403)
            assert ("does not allow scope produce" in edit.text) != may
            fields = {"schedule": "daily", "back": "/"} | ({} if may else {"key": "0" * 64})
            done = visitor.act(topic, "schedule_pause", **fields)
            assert done.status_code == (303 if may else 403)
    assert stored(site, topic).is_paused
    wait_until(lambda: any("schedule='daily'" in one for one in guarded.said))


def test_the_lists_of_a_token_and_of_a_topic_with_its_name_differ(
    site: Site, guarded: Gateway
) -> None:
    """They share reads with other visitors."""
    for topic in ("orders", "orders.other"):
        site.producer.schedule(f"of-{topic}", topic=topic, body=1, every="1d")
    with Visitor(guarded.url) as orders, Visitor(guarded.url) as everything:
        orders.log_in("orders-orders-orders")
        everything.log_in("everything-everything")
        assert "of-orders.other" in orders.page("/schedules")
        assert "of-orders.other" not in everything.page("/topics/orders/schedules")


def test_without_a_manager_schedules_are_late() -> None:
    with (
        EmbeddedServer() as server,
        Producer(server.url) as producer,
        Gateway(server.url) as gateway,
    ):
        for topic in ("reports", "bills"):
            producer.schedule("tick", topic=topic, body=1, every="1s")
        producer.schedule("daily", topic="bills", body=1, cron="@daily")
        get = gateway.client.get
        wait_until(lambda: "bills: Schedule late by" in get("/").text)
        overview = get("/").text
        assert overview.index("Managers: No manager") < overview.index("bills: Schedule late by")
        for path, rows in (("/schedules", 3), ("/topics/bills/schedules", 2)):
            page = get(path).text
            assert "Start lisa-manager" in page
            assert page.count("<tr>") == rows + 1
            assert page.count(">late by") == rows - 1
            assert page.index("name=tick") < page.index("name=daily")
        assert ">late by" in get("/topics/bills/schedule?name=tick").text
        cursor, names = None, list[tuple[str, str]]()
        while True:
            part = get("/v1/schedules", params={"cursor": cursor} if cursor else {}).json()
            names += [(one["topic"], one["name"]) for one in part["schedules"]]
            cursor = part["cursor"]
            if cursor is None:
                break
        assert sorted(names) == [("bills", "daily"), ("bills", "tick"), ("reports", "tick")]
        run = CliRunner().invoke
        listed = run(main, ["schedules", "list", "--json", "--redis", server.url]).stdout
        shown = [(one["topic"], one["name"]) for one in json.loads(listed)["schedules"]]
        assert shown == sorted(names)
        said = run(main, ["schedules", "list", "--redis", server.url]).stderr
        assert "schedules are overdue by" in said
        with Manager(server.url):
            wait_until(lambda: "Schedule late by" not in get("/").text)
