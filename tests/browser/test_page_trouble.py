"""The page of a system in trouble: what needs attention comes first."""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace as replace_presence

from lisa import Consumer, Manager, Producer
from lisa.admin.roles import RolePresence
from lisa.admin.topics import GroupCounts, NextReady, TopicState
from lisa.cli.main import main
from lisa.core.store.presence import (
    NO_HEARTBEATS,
    ConsumerPresence,
    ManagerPresence,
    PushPresence,
    RelayPresence,
)
from lisa.core.store.server_checks import Check, problems
from lisa.embedded import EmbeddedServer
from lisa.gateway.page import attention
from lisa.gateway.page.attention import Rank
from lisa.gateway.page.rendering import band, brief
from lisa.gateway.page.snapshot import Line, ServerFacts, Snapshot
from tests.browser.conftest import Site, Visitor, now_ms
from tests.gateways import Gateway, new_topic
from tests.servers import connect, wait_until

NOW = 1_800_000_000_000
HOUR = timedelta(hours=1)
DASH = "\N{EN DASH}"
MANAGER = RolePresence(ManagerPresence(name="m"), 0, alive=True)


def line(
    topic: str,
    *,
    alive: int = 1,
    ready: int = 0,
    late_ms: int = 0,
    due_for_ms: int = 0,
    paused: bool = False,
    new: int = 0,
) -> Line:
    """A topic with one group; its next message is `late_ms` late, its first attempt was earlier."""
    group = GroupCounts(name="g", ready=ready, in_flight=0, retry=0, garbage=new)
    counts = TopicState(topic=topic, waiting=0, next_due_ms=None, paused=paused, groups=(group,))
    return Line(
        counts,
        None,
        None,
        alive={"g": alive} if alive else {},
        next_ready={"g": NextReady(NOW - late_ms, NOW - max(late_ms, due_for_ms))}
        if late_ms
        else {},
        new_garbage=new,
    )


def snapshot(*lines: Line, managed: bool = True, **facts: object) -> Snapshot:
    managers = (MANAGER,) if managed else ()
    server = replace(ServerFacts(), **facts)  # type: ignore[arg-type]
    return Snapshot(NOW, {one.topic: one for one in lines}, (), managers, server)


def found(seen: Snapshot) -> list[tuple[Rank, str]]:
    return [(one.rank, one.where) for one in attention.problems(seen, list(seen.lines.values()))]


def relay(table: str, *, alive: bool = True, **about: Any) -> RolePresence[RelayPresence]:
    return RolePresence(RelayPresence(name=f"r-{table}", table=table, **about), 0, alive=alive)


def test_outboxes_that_are_not_forwarded_need_attention() -> None:
    late: dict[str, Any] = {"backlog": 3, "age_ms": 61_000}
    relays = [
        relay("ok", backlog=9_000, age_ms=59_000),
        relay("behind", **late),
        relay("gone", alive=False, **late),
        relay("stopped", alive=False, backlog=0),
        relay("replaced", alive=False, **late),
        relay("replaced", seen_ms=1),
        relay("failing", error="no such host"),
        relay("half", error="too many connections"),
        relay("half", backlog=1, seen_ms=1),
        relay("aside", set_aside=2),
    ]
    seen = replace(snapshot(line("calm")), relays=tuple(relays))
    problems = {one.where: (one.title, one.rank) for one in attention.problems(seen, [])}
    assert problems == {
        "behind": ("Relay is behind", Rank.RELAY),
        "gone": ("No relay", Rank.RELAY),
        "failing": ("Relay fails", Rank.RELAY),
        "aside": ("Rows set aside", Rank.GARBAGE),
    }
    (detail,) = (one.detail for one in attention.of_managers(seen) if one.where == "gone")
    assert detail == "3 rows waited, the oldest for 1m 1s, at the last heartbeat: start lisa-relay"
    unknown = replace(relays[2], is_unknown=True)
    assert found(replace(seen, relays=(unknown,))) == []


def test_problems_are_ranked_and_ordered_by_weight() -> None:
    seen = snapshot(
        line("fine", ready=3, late_ms=900),
        line("paused", alive=0, ready=5, late_ms=5_000, paused=True),
        line("dying", new=16),
        line("slow", ready=2, late_ms=60_000),
        line("left", alive=0, ready=2, late_ms=5_000),
        line("left-longer", alive=0, ready=2, late_ms=90_000),
        problems=(Check.warn("memory", "91 %", "x"), Check.fail("role", "a replica", "y")),
    )
    assert found(seen) == [
        (Rank.SERVER_FAILS, "Server"),
        (Rank.NO_CONSUMER, "left-longer"),
        (Rank.NO_CONSUMER, "left"),
        (Rank.OLD, "slow"),
        (Rank.GARBAGE, "dying"),
        (Rank.PAUSED, "paused"),
        (Rank.SERVER_WARNS, "Server"),
    ]


def test_a_retry_has_been_due_since_its_first_attempt() -> None:
    (one,) = attention.problems(
        snapshot(), [line("a", ready=1, late_ms=60_000, due_for_ms=3_600_000)]
    )
    assert one.title == "Due for 1\N{NO-BREAK SPACE}h"


def test_a_healthy_topic_is_not_reported() -> None:
    for healthy in (
        line("a"),
        line("a", ready=9, late_ms=59_999, due_for_ms=3_600_000),
        line("a", alive=0),
        line("a", alive=0, paused=True),
        line("a", new=15),
    ):
        assert found(snapshot(healthy)) == []
    # Only a consumer that is alive is degraded; it is linked.
    record = ConsumerPresence(name="w", topic="a", group="g", state="degraded", error="no disk")
    seen = replace(snapshot(line("a")), consumers=(RolePresence(record, 0, alive=True),))
    (one,) = attention.problems(seen, list(seen.lines.values()))
    assert (one.rank, one.href) == (Rank.DEGRADED, "/consumers?topic=a&name=w")
    assert one.detail.endswith("Last error: no disk")
    gone = replace(seen, consumers=(RolePresence(record, 60_000, alive=False),))
    assert found(gone) == []


def test_busy_handlers_and_failing_pushes_come_before_what_they_cause() -> None:
    push = PushPresence(group="g", host="hooks.example", failed=3, failing_ms=660_000, error="500")
    pushing = ConsumerPresence(name="gateway", topic="pushed", group="g", pushes=(push,))
    busy = ConsumerPresence(name="w", topic="slow", group="g", concurrency=4, busy_ms=660_000)
    lines = [line("slow", ready=2, late_ms=61_000), line("pushed", new=16), line("fine")]
    seen = replace(
        snapshot(*lines),
        consumers=tuple(
            RolePresence(one, 0, alive=True)
            for one in (pushing, busy, replace_presence(busy, topic="fine"))
        ),
    )
    items = attention.problems(seen, lines)
    assert [(one.rank, one.topic) for one in items] == [
        (Rank.BUSY, "slow"),
        (Rank.DEGRADED, "pushed"),
        (Rank.OLD, "slow"),
        (Rank.GARBAGE, "pushed"),
    ]
    assert items[0].title == "All handlers busy for 11\N{NO-BREAK SPACE}m"
    assert items[0].detail.endswith("of other topics")
    assert items[1].title == "Failing push"
    assert items[1].detail == (
        "the last 3 pushes to hooks.example failed, since 2027-01-15 07:49:00. Last error: 500"
    )


def test_a_missing_manager_is_worse_while_messages_are_overdue() -> None:
    calm, since = line("a"), NOW - 9_000
    overdue = replace(calm, counts=replace(calm.counts, next_due_ms=since), waits_since_ms=since)
    assert found(snapshot(calm, managed=False)) == [(Rank.MANAGER_GONE, "Managers")]
    assert found(snapshot(overdue, managed=False)) == [(Rank.NO_MANAGER, "Managers")]
    assert found(snapshot(managed=False)) == []


@pytest.mark.parametrize(
    ("setting", "to", "usual", "cause"),
    [
        ("maxmemory", "1", "0", "is out of memory"),
        ("min-replicas-to-write", "1", "0", "has too few connected replicas"),
    ],
)
def test_a_server_that_refuses_writes_is_the_cause(
    setting: str, to: str, usual: str, cause: str
) -> None:
    """Roles cannot write their heartbeats then, and do not count as gone."""
    silent_ms = now_ms() - 60_000
    with EmbeddedServer() as server, connect(server.url) as raw, Gateway(server.url) as gateway:
        with Producer(server.url) as producer, Manager(server.url):
            raw.xgroup_create("lisa:{crm}:g:lisa:ready", "lisa", mkstream=True)
            raw.hset("lisa:{crm}:groups", "lisa", "1")
            producer.send("crm", 1)
            wait_until(lambda: raw.xlen("lisa:{crm}:g:lisa:ready"))
        record = {"name": "m", "seen_ms": silent_ms}
        raw.hset("lisa:managers", "m", json.dumps(record))
        raw.hset("lisa:{crm}:consumers", "w", json.dumps({**record, "topic": "crm"}))

        def text(path: str) -> str:
            page = gateway.client.get(path).text.partition("<main")[2]
            return " ".join(re.sub(r"<[^>]+>", " ", page).split())

        def lisa(*words: str) -> str:
            return CliRunner().invoke(main, [*words, "--redis", server.url]).output

        wait_until(lambda: "crm: No consumer" in text("/"))
        assert "Managers: No manager" in text("/")
        raw.config_set(setting, to)
        wait_until(lambda: "Refuses writes" in text("/"))
        for path in ("/", "/topics/crm", "/managers"):
            seen = text(path)
            assert cause in seen
            assert seen.index("Server: Refuses writes") < seen.index("Managers: No heartbeat")
            assert "Start lisa-manager" not in seen
            assert "gone" not in seen
        assert "crm: No heartbeat" in text("/")
        assert "No consumer" not in text("/")
        first, *rest = json.loads(lisa("doctor", "--json"))["checks"]
        assert (first["verdict"], cause in first["found"]) == ("fail", True)
        assert next(one for one in rest if one["check"] == "managers")["found"] == NO_HEARTBEATS
        for command in ("topics", "top --once --interval 0.1"):
            said = lisa(*command.split())
            assert cause in said
            assert "no manager" not in said
            assert "is the name right" not in said
        assert "is the name right" not in lisa("doctor")
        (manager,) = gateway.client.get("/v1/managers").json()["managers"]
        (consumer,) = json.loads(lisa("consumers", "--json"))
        for role in (manager, consumer):
            assert (role["alive"], role["unknown"]) == (False, True)
        health = gateway.client.get("/healthz")  # a full server can be drained
        is_full = setting == "maxmemory"
        assert health.status_code == (200 if is_full else 503)
        assert cause in health.json()["warning" if is_full else "fault"]
        refuses = "\nlisa_server_refuses_writes "
        assert f"{refuses}1" in gateway.client.get("/metrics").text
        raw.config_set(setting, usual)
        wait_until(lambda: "Managers: No manager" in text("/"))
        wait_until(lambda: f"{refuses}0" in gateway.client.get("/metrics").text)
        assert "no consumer has ever handled the messages of crm" in lisa("topics")


def test_problems_of_the_server_are_those_of_the_doctor() -> None:
    facts = {"role": "master", "aof_enabled": "0", "maxmemory_policy": "allkeys-lru"}
    facts |= {"maxmemory": "100", "used_memory": "91"}
    assert [(one.name, str(one.verdict)) for one in problems(facts)] == [
        ("maxmemory-policy", "fail"),
        ("persistence", "warn"),
        ("memory", "warn"),
    ]
    assert problems({"aof_enabled": "1"}) == []


def minute_ago(n: int) -> str:
    """The id of a sample taken n minutes ago."""
    return f"{(int(datetime.now(UTC).timestamp()) // 60 - n) * 60_000}-0"


def rows(page: str) -> list[str]:
    return re.findall(r'<tr id="t-([^"]+)"', page)


def test_the_overview_begins_with_what_needs_attention(site: Site) -> None:
    lost, fine = new_topic("lost"), new_topic("a-fine")
    site.producer.send(fine, 1, delay=HOUR)
    site.kill(lost, "declares-the-group", 1, "no")
    site.producer.send_many(lost, range(3), at=datetime.now(UTC) - timedelta(minutes=12))
    wait_until(lambda: f"{lost}: No consumer" in site.page("/"))
    page = site.page("/")
    assert page.index("Needs attention") < page.index('class="tiles"')
    own = site.page(f"/topics/{lost}")
    assert own.index(f"{lost}: No consumer") < own.index('class="tiles"')
    assert "3 messages are due, the oldest for 12\N{NO-BREAK SPACE}m<" in page
    assert f'href="/topics/{lost}"><strong>' in page
    assert rows(page).index(lost) < rows(page).index(fine)
    by_name = rows(site.page("/", sort="topic"))
    assert by_name == sorted(by_name)
    with Consumer(site.server.url) as consumer:
        consumer.on(lost)(lambda _message: None)
        consumer.start()
        wait_until(lambda: f"{lost}: No consumer" not in site.page("/"))


def test_the_last_hour_is_drawn(site: Site) -> None:
    topic = new_topic("drawn")
    for minute in range(90, -1, -1):
        counters: dict[Any, Any] = {"sent": 120 * (90 - minute), "acked@lisa": 60 * (90 - minute)}
        site.raw.xadd(f"lisa:{{{topic}}}:history", counters, id=minute_ago(minute))
    site.producer.send(topic, 1, delay=HOUR)
    wait_until(lambda: topic in site.page("/"))
    row = site.page("/").partition(f'id="t-{topic}"')[2].partition("</tr>")[0]
    assert "Last hour: at most 2.0 sent and 1.0 acked per second" in row
    (sent, acked) = re.findall(r'points="([^"]+)"', row)
    # Without the newest point, whose sample may be the manager's.
    assert {point.partition(",")[2] for point in sent.split()[:-1]} == {"1.0"}
    assert {point.partition(",")[2] for point in acked.split()[:-1]} == {"8.0"}
    assert sent.split()[-1].startswith("60.0,")


def test_bands_and_brief_durations() -> None:
    bands = {
        (None, 0): "overdue",
        (0, 1_000): "< 1 s",
        (1_000, 5_000): "1\N{EN DASH}5 s",
        (30_000, 60_000): "30 s \N{EN DASH} 1 min",
        (300_000, 1_800_000): "5\N{EN DASH}30 min",
        (86_400_000, 604_800_000): "1\N{EN DASH}7 d",
        (2_592_000_000, None): "> 30 d",
    }
    assert {key: band(*key) for key in bands} == bands
    times = {999: "0 s", 59_999: "59 s", 725_000: "12 m", 7_200_000: "2 h"}
    assert {ms: brief(ms).replace("\N{NO-BREAK SPACE}", " ") for ms in times} == times


def test_empty_charts_say_why_and_pauses_are_marked(site: Site, visitor: Visitor) -> None:
    topic = new_topic("empty")
    path, history = f"/topics/{topic}", f"lisa:{{{topic}}}:history"
    site.producer.send(topic, 1, delay=timedelta(days=20))
    for ago in (70, 2):
        site.raw.xadd(history, {"sent": 1}, id=minute_ago(ago))
    page = visitor.page(path)
    assert "No message is due within these 60 minutes." in page
    assert "so there is no lateness." in page
    assert "No message was sent, acked or retried in this period." in page
    assert "No message moved to garbage in this period." in page
    assert 'class="plot"' not in page
    visitor.did(topic, "pause")
    assert re.search(r'data-marks="[\d.]+ paused;"', visitor.page(path))
    visitor.did(topic, "resume")
    assert "resumed;" in visitor.page(path)


def test_rates_are_shown_per_group(site: Site) -> None:
    """A topic without rates yet has a page, too."""
    topic = new_topic("rates")
    head = f"lisa:{{{topic}}}:"
    for group in ("fast", "slow"):
        site.raw.hset(f"{head}groups", group, "1")
        site.raw.xgroup_create(f"{head}g:{group}:ready", group, id="0", mkstream=True)
    site.producer.send(topic, 1, delay=HOUR)

    def rates() -> dict[str, str]:
        site.raw.hincrby(f"{head}stats", "acked@fast", 1_000)
        row = r'title="(fast|slow)">.*?<td class="roomy">([^<]*)</td><td class="wide">[^<]*</td></'
        return dict(re.findall(row, site.page(f"/topics/{topic}"), re.DOTALL))

    # The first look: there is none to compare with.
    with Gateway(site.server.url) as fresh:
        assert 'title="fast"' in fresh.client.get(f"/topics/{topic}").text
    wait_until(lambda: rates().get("fast", DASH) not in ("0", DASH))
    assert rates()["slow"] == "0"
