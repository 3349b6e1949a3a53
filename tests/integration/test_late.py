"""Late policies with real managers: what happens to the messages of an outage."""

import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lisa import InvalidMessage, Manager, Message, Outgoing, Producer, Ramp
from lisa.admin import topics
from lisa.admin.fsck import check
from lisa.admin.topics import ramp_state
from lisa.core.metrics.topics import read as read_metrics
from lisa.core.model import signals
from lisa.core.model.clock import datetime_ms, ms_datetime
from lisa.core.model.keys import keyed_id
from lisa.core.model.sharding import PLAIN, Topic
from lisa.manager.scheduler import Scheduler
from lisa.testing import ClockedServer
from tests.roles import Cast, Services
from tests.servers import Processes, no_clock, wait_until
from tests.shards import ORDERS, Split
from tests.shifted_server import ShiftedServer, missing

pytestmark = pytest.mark.timeout(300)

MINUTE = 60_000
A_WHILE = timedelta(minutes=2)
LATE = "600000"
FAR = 4_000_000_000_000


@pytest.fixture
def cast(redis_url: str) -> Cast:
    return Cast(redis_url).declare()


def states(cast: Cast, ids: list[str]) -> list[str]:
    return [state for i in range(0, len(ids), 100) for state in cast.states(ids[i : i + 100])]


def test_an_id_of_another_program_does_not_occupy_a_manager(cast: Cast) -> None:
    """Message ids are UTF-8. The manager kept trying to end other members of the ZSET."""
    cast.configure(late=f"{LATE},skip")
    for zset in (cast.keys.waiting, cast.keys.expiry):
        cast.store.ask("ZADD", zset, cast.now_ms() - 20 * MINUTE, b"\xff\xfe")
    services = Services(cast)
    services.promoter.step(["orders"])
    assert cast.store.ask("EXISTS", cast.keys.waiting, cast.keys.expiry) == 0
    assert services.promoter.step(["orders"]) == [None]


OUTAGE_MS = 10 * MINUTE
BOUND_MS = 5 * MINUTE
CLASSES: dict[str, tuple[str | None, int, int, str]] = {
    # own policy, first and last minute of the outage in which its messages fall due, state after it
    "late": (None, 0, 4, "skipped"),
    "own garbage": ("garbage after 5m", 0, 4, "garbage"),
    "own run": ("run", 0, 10, "ready"),
    "own bound": ("skip after 30m", 0, 10, "ready"),
    "in time": (None, 8, 10, "ready"),
    "after": ("skip after 5m", 11, 12, "waiting"),
}
"""The messages of the outage. None falls due at the bound: managers take their time, too."""


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("count", [2_400, pytest.param(100_000, marks=pytest.mark.slow)])
def test_messages_fall_due_while_all_managers_are_down(
    tmp_path: Path, processes: Processes, count: int
) -> None:
    """Two managers are killed for ten minutes by the server's clock; others come afterwards."""
    with ShiftedServer(tmp_path / "server") as server, Producer(server.url) as producer:
        cast = Cast(server.url).declare()
        cast.configure(late=f"{BOUND_MS},skip", max_ready=str(2 * count))
        down = [processes.start("-m", "lisa.cli.manager", "--redis", server.url) for _ in range(2)]
        before = producer.send("orders", "before", delay="10ms")
        wait_until(lambda: cast.state(before) == "ready")
        began_ms = cast.now_ms() + A_WHILE // timedelta(milliseconds=1)
        ids = send_classes(producer, began_ms, count)
        assert cast.now_ms() < began_ms, "the messages were not sent before the outage"
        for one in down:
            one.kill()
        server.step(timedelta(milliseconds=began_ms + OUTAGE_MS - cast.now_ms()))
        sent = sum(map(len, ids.values()))
        assert cast.store.ask("ZCARD", cast.keys.waiting) == sent, "a manager was not down"
        for _ in range(2):
            processes.start("-m", "lisa.cli.manager", "--redis", server.url)
        now = producer.send("orders", "now", delay="10ms")
        wait_until(
            lambda: cast.store.ask("ZCARD", cast.keys.waiting) == len(ids["after"]),
            timeout=A_WHILE,
        )
        found = {name: Counter(states(cast, some)) for name, some in ids.items()}
        assert found == {name: {CLASSES[name][3]: len(some)} for name, some in ids.items()}
        # Messages that fall due after the outage are in time.
        server.step(timedelta(milliseconds=began_ms + 12 * MINUTE - cast.now_ms()))
        wait_until(lambda: not cast.store.ask("ZCARD", cast.keys.waiting), timeout=A_WHILE)
        assert set(states(cast, [*ids["after"], before, now])) == {"ready"}
        stats = cast.stats()
        assert stats["skipped"] == len(ids["late"])
        assert stats["garbage@g"] == len(ids["own garbage"])
        assert stats["sent"] == sent + 2
        assert stats["sent"] == stats["skipped"] + stats["garbage@g"] + stats["promoted"]
        assert cast.store.drive(check(cast.store, ["orders"])).total == 0


def send_classes(producer: Producer, began_ms: int, count: int) -> dict[str, list[str]]:
    """Send about so many messages, spread over their minutes; the ids of each class."""
    ids: dict[str, list[str]] = {}
    for name, (late, first, last, _) in CLASSES.items():
        n = count // len(CLASSES)
        step_ms = (last - first) * MINUTE / n
        dues = [began_ms + first * MINUTE + int(step_ms * k) for k in range(n)]
        messages = [Outgoing("x", id=f"{name} {k}", at_ms=due) for k, due in enumerate(dues)]
        ids[name] = [outcome.id for outcome in producer.send_many("orders", messages, late=late)]
    return ids


def test_a_message_may_have_its_own_policy_and_its_end_is_signalled(
    cast: Cast, redis_url: str
) -> None:
    """A message's policy replaces the topic's, and its retry delays stay what they are."""
    heard: list[tuple[str, str, str | None, object]] = []

    def hear(name: str, message: Message) -> None:
        heard.append((name, message.id, message.reason, message.body))

    cast.configure(late=f"{LATE},garbage")
    due = cast.now_ms() - 11 * MINUTE
    with Producer(redis_url) as producer:
        producer.send("orders", {"n": 1}, id="skip", at_ms=due, late="skip after 10m", retry="7s")
        messages = [
            Outgoing({"n": 2}, id="topic's", late=None, retry=[]),
            Outgoing(3, id="run", late="run"),
            Outgoing(4, id="later", late={"after": timedelta(hours=1), "then": "skip"}),
        ]
        producer.send_many("orders", messages, at_ms=due, retry="9s")
        with pytest.raises(InvalidMessage, match="a single message takes run, skip or garbage"):
            producer.send("orders", 1, late="collapse after 10m")
    policies = cast.store.ask("HGETALL", cast.keys.policy)
    assert dict(zip(policies[::2], policies[1::2], strict=True)) == {
        b"skip": b"7000;600000,skip",
        b"topic's": b"",
        b"run": b"9000;0,run",
        b"later": b"9000;3600000,skip",
    }
    with (
        signals.everywhere.expired.connected_to(lambda _, message: hear("expired", message)),
        signals.everywhere.dead.connected_to(lambda _, message: hear("dead", message)),
        Manager(redis_url),
    ):
        wait_until(lambda: not cast.store.ask("EXISTS", cast.keys.waiting) and len(heard) == 2)
    found = {name: cast.state(name) for name in ("skip", "topic's", "run", "later")}
    assert found == {"skip": "skipped", "topic's": "garbage", "run": "ready", "later": "ready"}
    why = "too late (late policy)"
    ends = [("dead", "topic's", why, {"n": 2}), ("expired", "skip", why, {"n": 1})]
    assert sorted(heard, key=str) == ends


@pytest.mark.skipif(no_clock() is not None, reason=str(no_clock()))
@pytest.mark.parametrize(
    ("by", "shards", "key"),
    [("schedule", 1, None), ("topic", 1, None), ("topic", 3, None), ("topic", 3, "k")],
)
def test_after_an_outage_collapse_runs_only_the_newest_occurrence(
    by: str, shards: int, key: str | None
) -> None:
    """Promotion starts before the schedule has caught up: the pending occurrence looks newest."""
    with ClockedServer() as server, Producer(server.url) as producer:
        cast = Cast(server.url).declare()
        if shards > 1:
            Split(server.url).into(shards)
        options: dict[str, Any] = {"late": "collapse after 5m"} if by == "schedule" else {}
        start = ms_datetime(cast.now_ms() // 1000 * 1000 + MINUTE)
        options |= {"start": start, "catch_up": "all", "key": key}
        producer.schedule("job", topic="orders", body=1, every="10m", **options)
        if by == "topic":
            late = {"late": "collapse after 5m"}
            cast.store.drive(topics.set_options(cast.store, "orders", late))
        producer.send("orders", 1, id="mail@5", key=key, delay="1m")
        start_ms = datetime_ms(start, None)
        ticks = [start_ms + n * 10 * MINUTE for n in range(7)]
        for minutes in (67, 69):
            server.set_time((start_ms + minutes * MINUTE) * 1000)
            settle(cast)
            found = [producer.get("orders", keyed_id(key, f"job@{tick}")) for tick in ticks]
            assert [one.state if one else None for one in found] == ["skipped"] * 6 + ["ready"]
            # The tombstones expire, and the same occurrences come again: a newer one was promoted.
            server.set_time((start_ms + 69 * MINUTE) * 1000)
            end = start + timedelta(minutes=50)
            created, _ = producer.backfill_schedule("orders", "job", start, end)
            assert created == (6 if minutes == 67 else 0)
        other = producer.get("orders", keyed_id(key, "mail@5"))
        assert other is not None
        assert other.state == "ready", "an id that looks like an occurrence is of no schedule"


def settle(cast: Cast) -> None:
    """Let a manager's services work until nothing is due."""
    services = Services(cast)
    scheduler = Scheduler(cast.store, services.clock)
    shards = cast.store.drive(cast.store.layout(Topic("orders"))).active(Topic("orders"))
    for _ in range(5):
        for _ in range(5):
            services.promoter.step(shards)
        scheduler.step(["orders"])


def test_managers_share_a_ramp(cast: Cast, redis_url: str) -> None:
    """Three managers: the backlog comes at the ramp's rate, and messages on time at once."""
    rate, count = 500, 1_000
    cast.configure(ramp=f"{rate},1000,oldest")
    with Producer(redis_url) as producer:
        due = cast.now_ms() - MINUTE
        late = [f"late{n}" for n in range(count)]
        producer.send_many("orders", [Outgoing(1, id=one, at_ms=due) for one in late])
        with Manager(redis_url), Manager(redis_url), Manager(redis_url):
            fresh = []
            while cast.store.ask("ZCARD", cast.keys.waiting):
                fresh.append(producer.send("orders", 1, delay="10ms"))
                time.sleep(0.02)
    entries = {}  # for each ready message, the instant of its promotion and its due time
    for entry, fields in cast.store.ask("XRANGE", cast.own.ready, "-", "+"):
        values = dict(zip(fields[::2], fields[1::2], strict=True))
        entries[values[b"id"].decode()] = (int(entry.partition(b"-")[0]), int(values[b"due"]))
    assert set(entries) == {*late, *fresh}
    at = sorted(entries[one][0] for one in late)
    for first, later in zip(at, at[rate:], strict=False):
        assert later - first >= 880, "within a second, at most the rate and a tenth of it"
    lateness = sorted(entries[one][0] - entries[one][1] for one in fresh)
    assert lateness[len(lateness) // 2] < 1_000


def test_a_ramp_reports_how_long_it_takes(cast: Cast, redis_url: str) -> None:
    shards = 4
    ramp = Ramp.parse("2/s newest first")
    cast.store.drive(topics.set_options(cast.store, "orders", {"ramp": ramp, "shards": shards}))
    with Producer(redis_url) as producer:
        due = cast.now_ms() - MINUTE
        ids = [f"m{n}" for n in range(80)]
        producer.send_many("orders", [Outgoing(1, id=one, at_ms=due) for one in ids])
        producer.send("orders", 1, at_ms=FAR)
        state = cast.store.drive(ramp_state(cast.store, "orders", ramp, cast.now_ms()))
    assert state.backlog == 80
    layout = PLAIN._replace(shards=shards)
    fullest = max(Counter(layout.shard_for(ORDERS, one) for one in ids).values())
    assert state.lasts == timedelta(seconds=fullest * shards / 2)
    numbers = cast.store.drive(read_metrics(cast.store))
    assert numbers["lisa_topic_ramp_messages"] == {("orders",): 80}
    assert numbers["lisa_topic_ramp_seconds"] == {("orders",): state.lasts.total_seconds()}
