"""Operators' commands on large and damaged topics, and the doctor's findings on servers."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from lisa import Consumer
from lisa.admin import garbage, groups, live
from lisa.admin.doctor import examine
from lisa.admin.groups import delete
from lisa.admin.messages import LiveState, MessagePage, Row, list_messages
from lisa.admin.topics import TopicState, counts, exists, set_options
from lisa.core.model.envelope import encode_envelope, new_token
from lisa.core.model.errors import ConfigError, GroupRemoved, TopicInUse
from lisa.core.store.registration import IDLE_AFTER_MS
from lisa.core.store.server_checks import Check, CheckResult, without_append_only_file
from lisa.core.store.store import SyncStore
from lisa.core.transitions.delivery import Open, Pull
from lisa.core.transitions.groups import Declare, Undeclare
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.retry import Fail, Failure
from lisa.embedded import EmbeddedServer
from tests.rows import Item, enqueue
from tests.servers import connect, open_store, wait_until

TOPIC = "orders"


@pytest.fixture
def server(redis_url: str) -> str:
    return redis_url


def send(store: SyncStore, ids: list[str], due: str = "+0") -> None:
    envelope = encode_envelope(new_token(), "x")
    for start in range(0, len(ids), 100):
        items = [Item(one, due, envelope) for one in ids[start : start + 100]]
        store.call(enqueue(TOPIC, new_token(), items))


def take(store: SyncStore, group: str, count: int) -> list[Failure]:
    found = store.call(Pull(TOPIC, group, "c1", count)).entries
    store.call(Open(TOPIC, group, found))
    return [Failure(one.id, one.entry, f"reason {one.id}", "discard") for one in found]


def die(store: SyncStore, group: str, count: int) -> None:
    store.call(Fail(TOPIC, group, take(store, group, count)))


def walk(store: SyncStore, state: LiveState, limit: int, **options: Any) -> Iterator[MessagePage]:
    cursor = None
    while True:
        page = store.drive(
            list_messages(store, TOPIC, state, cursor=cursor, limit=limit, **options)
        )
        yield page
        cursor = page.cursor
        if cursor is None:
            return


def listed(store: SyncStore, state: LiveState, limit: int, **options: Any) -> list[Row]:
    return [row for page in walk(store, state, limit, **options) for row in page.rows]


# Deletion


def fill(store: SyncStore) -> None:
    """Messages in all states, for two groups."""
    store.call(Declare(TOPIC, "g"))
    store.call(Declare(TOPIC, "h"))
    send(store, ["dead"])
    die(store, "g", 1)
    send(store, ["held", "ready"])
    take(store, "g", 1)
    send(store, [f"w{n}" for n in range(250)], due="+60000000")


@pytest.mark.parametrize("odd", ["", "waiting ids without messages", "an interrupted removal"])
def test_a_deleted_topic_leaves_only_the_records_of_its_ids(store: SyncStore, odd: str) -> None:
    fill(store)
    store.drive(set_options(store, TOPIC, {"capacity": 500, "journal": True}))
    keys = store.keys.topic(TOPIC)
    if odd == "an interrupted removal":
        store.call(Undeclare(TOPIC, "g"))
    elif odd:  # another program added an id that is not UTF-8, and deleted a body
        store.ask("DEL", keys.body("w2"))
        store.ask("ZADD", keys.waiting, 4_000_000_000_000, b"\xff")
    done = store.drive(delete(store, TOPIC))
    assert odd or (done.cancelled, done.purged) == (250, 3)
    left = {key.decode().split(":")[-2] for key in store.ask("KEYS", "lisa:{orders}:*")}
    assert left <= {"done", "reply"}
    assert not store.drive(exists(store, TOPIC))
    assert store.drive(store.topics()) == [TOPIC]
    listed_ms = float(store.ask("ZSCORE", store.keys.topics, TOPIC))
    unlisted_in_s = (listed_ms + IDLE_AFTER_MS) / 1000 - time.time()
    assert 0 < unlisted_in_s <= IDLE_AFTER_MS / 1000, "managers unlist it then"
    send(store, ["w1", "new"])
    assert store.drive(exists(store, TOPIC))
    (found,) = store.drive(counts(store, [TOPIC]))
    assert (found.waiting, found.groups, found.total("sent")) == (1, (), 1), "w1 is known"


def test_a_topic_in_use_is_not_deleted(
    store: SyncStore, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(said: str) -> TopicState:
        with pytest.raises(TopicInUse, match=said):
            store.drive(delete(store, TOPIC))
        return store.drive(counts(store, [TOPIC]))[0]

    fill(store)
    keys, check_archives = store.keys.topic(TOPIC), groups._check_archives
    consumer = Consumer(server)
    consumer.subscribe(TOPIC, lambda _: None, group="other")
    with consumer:
        wait_until(lambda: store.ask("HLEN", keys.consumers))
        assert refused("has the running consumer").waiting == 250

    def send_meanwhile(*given: Any) -> Any:
        send(store, ["late"])
        return check_archives(*given)

    with monkeypatch.context() as patch:
        patch.setattr(groups, "_check_archives", send_meanwhile)
        found = refused("got messages or a group")
    assert (found.waiting, found.groups) == (1, ()), "what arrives during the deletion is kept"
    assert store.drive(delete(store, TOPIC)).cancelled == 1
    store.drive(set_options(store, TOPIC, {"journal": True}))
    send(store, ["m"], due="+60000000")
    store.ask("HSET", keys.archived, "cold", f"1-0 1 {int(time.time() * 1000)}")
    refused("archive cold has not read 1 events")
    store.ask("HDEL", keys.archived, "cold")
    store.drive(delete(store, TOPIC))
    store.drive(set_options(store, TOPIC, {"shards": 4}))
    send(store, ["n"], due="+60000000")
    refused("split into shards")
    # The field tells managers which keys are left, as after a crash of the first one.
    store.ask("DEL", keys.options)
    store.ask("HSET", keys.options, "removed:4", "1")
    refused("split into shards")


# Groups


def test_a_removal_settles_only_the_group_s_messages(store: SyncStore) -> None:
    for group in ("a", "b"):
        store.call(Declare(TOPIC, group))
    ids = [f"m{n}" for n in range(450)]
    send(store, ids)
    die(store, "a", 150)
    take(store, "a", 100)
    send(store, ["later"], "+60000")
    assert store.drive(groups.remove(store, TOPIC, "a")) == 0, "the other group owes them all"
    keys = store.keys.topic(TOPIC)
    assert store.ask("EXISTS", *keys.group("a")) == 0
    assert store.ask("HLEN", keys.group("b").entries) == 450
    assert store.drive(groups.remove(store, TOPIC, "b")) == 450
    assert store.drive(groups.remove(store, TOPIC, "b")) is None
    found = store.call(Inspect(TOPIC, ["m0", "m449", "later"]))
    assert [one.tombstone and one.tombstone.state for one in found] == ["purged", "purged", None]
    assert store.ask("ZRANGE", keys.waiting, 0, -1) == [b"later"]
    assert store.ask("HKEYS", keys.options) == []


# Lists


@pytest.mark.parametrize("limit", [7, 1000])
def test_every_state_is_listed_whole(limit: int, store: SyncStore) -> None:
    for group in ("a", "b"):
        store.call(Declare(TOPIC, group))
    send(store, [f"m{n:02d}" for n in range(40)])
    for group in ("a", "b"):
        die(store, group, 10)
        held = take(store, group, 10)
        store.call(Fail(TOPIC, group, [one._replace(delay=60_000) for one in held]))
        take(store, group, 10)
    send(store, [f"w{n:02d}" for n in range(25)], "+60000")
    states = (LiveState.GARBAGE, LiveState.RETRY, LiveState.IN_FLIGHT, LiveState.READY)
    for number, state in enumerate(states):
        ids = [f"m{n:02d}" for n in range(10 * number, 10 * number + 10)]
        rows = listed(store, state, limit)
        assert [(row.group, row.id) for row in rows] == [
            (group, one) for group in "ab" for one in ids
        ]
        assert [row.id for row in listed(store, state, limit, group="b")] == ids
    rows = listed(store, LiveState.WAITING, limit)
    assert [row.id for row in rows] == [f"w{n:02d}" for n in range(25)]


def test_equal_due_times_and_a_cursor_whose_message_has_gone(store: SyncStore) -> None:
    ids = [f"m{n:04d}" for n in range(1_000)]
    send(store, ids, "2208988800000")
    seen: list[str] = []
    for page in walk(store, LiveState.WAITING, 64):
        seen += [row.id for row in page.rows]
        # Listed messages are removed, including the cursor's message.
        store.ask("ZREM", store.keys.topic(TOPIC).waiting, *[row.id for row in page.rows][1:])
    assert seen == ids
    assert listed(store, LiveState.WAITING, 64, due_before_ms=2_208_988_800_000) == []


def test_lists_of_unknown_groups_and_damaged_topics(store: SyncStore) -> None:
    send(store, ["a"], "+60000")
    for cursor in ("x", "/x:y"):
        with pytest.raises(ConfigError, match="not a cursor"):
            store.drive(list_messages(store, TOPIC, LiveState.WAITING, cursor=cursor))
    with pytest.raises(GroupRemoved):
        store.drive(list_messages(store, TOPIC, LiveState.READY, group="nope"))
    store.call(Declare(TOPIC, "a"))
    send(store, ["m"])
    store.ask("DEL", store.keys.topic(TOPIC).group("a").ready)
    assert store.drive(list_messages(store, TOPIC, LiveState.READY)).rows == ()
    assert store.drive(list_messages(store, TOPIC, LiveState.IN_FLIGHT)).rows == ()
    (found,) = store.drive(counts(store, [TOPIC]))
    assert [group.intact for group in found.groups] == [False]


# Garbage


def test_all_garbage_page_by_page_by_age_and_reason(store: SyncStore) -> None:
    for group in ("a", "b"):
        store.call(Declare(TOPIC, group))
    send(store, [f"m{n:03d}" for n in range(500)])
    for group in ("a", "b"):
        for _ in range(2):
            die(store, group, 250)
    of_a = garbage.GarbageSelection(topic=TOPIC, group="a", reason="REASON M00")
    assert store.drive(garbage.matching(store, of_a)) == 10
    assert store.drive(garbage.act(store, of_a, garbage.requeue)) == 10
    everything = garbage.GarbageSelection(topic=TOPIC)
    assert store.drive(garbage.matching(store, everything)) == 990
    for before_ms in (0, 1):
        long_ago = garbage.GarbageSelection(topic=TOPIC, died_before_ms=before_ms)
        assert store.drive(garbage.act(store, long_ago, garbage.purge)) == 0
    steps: list[int] = []
    done = store.drive(garbage.act(store, everything, garbage.purge, progress=steps.append))
    assert (done, steps[-1]) == (990, 990)
    assert len(steps) > 2, "not all in one call"
    keys = store.keys.topic(TOPIC)
    assert store.ask("ZCARD", keys.group("a").retry) == 10
    assert len(store.ask("KEYS", keys.bodies_pattern())) == 10, "bodies of both groups' dead go"


def test_garbage_dated_later_than_now_is_taken_once(store: SyncStore) -> None:
    """The server's clock was set back after most messages died."""
    store.call(Declare(TOPIC, "a"))
    send(store, [f"m{n}" for n in range(250)])
    die(store, "a", 250)
    dead = store.keys.topic(TOPIC).group("a").garbage
    later_ms = store.drive(store.server_time_ms()) + 60_000
    store.ask("ZADD", dead, *[part for n in range(240) for part in (later_ms, f"m{n}")])

    def requeue_and_die(store: Any, topic: str, group: str, ids: Any) -> Any:
        done = yield from garbage.requeue(store, topic, group, ids)
        yield from store.command("ZREM", store.keys.topic(topic).group(group).retry, *ids)
        yield from store.command("ZADD", dead, *[x for one in ids for x in (later_ms - 1, one)])
        return done

    everything = garbage.GarbageSelection(topic=TOPIC)
    assert store.drive(garbage.act(store, everything, requeue_and_die)) == 250
    early = garbage.GarbageSelection(topic=TOPIC, died_before_ms=later_ms - 1)
    assert store.drive(garbage.act(store, early, garbage.purge)) == 0
    assert store.drive(garbage.act(store, everything, garbage.purge)) == 250


def test_the_last_of_few_matches_among_much_garbage_is_found_page_by_page(
    store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[int] = []

    def counted(*given: Any, limit: int, **options: Any) -> Any:
        pages.append(limit)
        return list_messages(*given, limit=limit, **options)

    monkeypatch.setattr(garbage, "list_messages", counted)
    store.call(Declare(TOPIC, "a"))
    send(store, [f"m{n:03d}" for n in range(600)])
    for _ in range(3):
        die(store, "a", 200)
    wanted = garbage.GarbageSelection(topic=TOPIC, reason="reason m0")  # the first hundred
    first = store.drive(garbage.listed(store, wanted, limit=99))
    rest = store.drive(garbage.listed(store, wanted, cursor=first.cursor, limit=2))
    assert [row.id for row in first.rows + rest.rows] == [f"m{n:03d}" for n in range(100)]
    assert rest.cursor is None
    assert len(pages) < 10


# Live


def test_rates_and_lateness_of_an_interval(store: SyncStore) -> None:
    stats = store.keys.topic(TOPIC).stats
    store.ask("HSET", stats, "sent", 100, "acked@a", 50, "acked@b", 50, "late:a@a", 1_000)
    before = store.drive(live.look(store))
    store.ask("HSET", stats, "sent", 300, "acked@a", 100, "acked@b", 150, "late:e@b", 98)
    store.ask("HSET", stats, "late:j@a", 2, "retried@a", 5)
    after = live.TopicsSnapshot(before.at_us + 2_000_000, store.drive(live.look(store)).topics)
    (found,) = live.activity(before, after).values()
    assert [found.per_s(name) for name in ("sent", "acked", "retried")] == [100, 75, 2.5]
    assert 1.5 < (found.lateness_ms(0.5) or 0) <= 2, "only what lies between the two looks"
    assert 10 < (found.lateness_ms(0.99) or 0) <= 15
    (quiet,) = live.activity(after, after).values()
    assert (quiet.per_s("sent"), quiet.lateness_ms(0.5), quiet.lateness_ms(0.99)) == (0, None, None)
    (set_back,) = live.activity(before, replace(after, at_us=before.at_us - 1)).values()
    assert set_back.per_s("sent") == 0


# Doctor


def verdicts(url: str) -> dict[str, Check]:
    store = open_store(url)
    return {one.name: one for one in store.drive(examine(store))}


def test_a_server_without_persistence(server: str) -> None:
    found = verdicts(server)
    failing = [one.name for one in found.values() if one.verdict is CheckResult.FAIL]
    assert failing == []
    assert "appendonly yes" in found["persistence"].cure
    assert found["persistence"].verdict is found["managers"].verdict is CheckResult.WARN
    assert {"server", "role", "clock", "commands", "rights", "scripts", "layout"} <= found.keys()
    with connect(server) as raw:
        assert raw.keys() == [b"lisa:schema"], "the doctor leaves nothing behind"


@pytest.mark.parametrize(
    ("uptime_s", "saved_s_ago", "changes", "verdict", "said"),
    [
        (100, 100, 5, CheckResult.WARN, "or all messages if there are no snapshots"),
        (90_000, 90_000, 5, CheckResult.FAIL, "no snapshot since the server's start 1d 1h ago"),
        (90_000, 90_000, 0, CheckResult.WARN, "or all messages if there are no snapshots"),
        (90_000, 600, 5, CheckResult.WARN, "snapshots only, the last 10m ago"),
    ],
)
def test_snapshots_are_judged_by_info(
    uptime_s: int, saved_s_ago: int, changes: int, verdict: CheckResult, said: str
) -> None:
    now_s = 1_800_000_000
    fields = {"server_time_usec": now_s * 1_000_000, "uptime_in_seconds": uptime_s}
    fields |= {"rdb_last_save_time": now_s - saved_s_ago, "rdb_changes_since_last_save": changes}
    found = without_append_only_file({name: str(value) for name, value in fields.items()})
    assert found.verdict is verdict
    assert said in found.found


def test_what_the_doctor_says_of_a_server(own_server: EmbeddedServer) -> None:
    def check_of(name: str) -> tuple[CheckResult, str]:
        found = verdicts(own_server.url)[name]
        return found.verdict, found.found + found.cure

    fit = verdicts(own_server.url)
    assert [one for one in fit.values() if one.verdict is CheckResult.FAIL] == []
    policies = {"allkeys-lru": CheckResult.FAIL, "volatile-ttl": CheckResult.WARN}
    with connect(own_server.url) as raw:
        for policy, expected in policies.items():
            raw.config_set("maxmemory-policy", policy)
            verdict, said = check_of("maxmemory-policy")
            assert (verdict, "noeviction" in said) == (expected, True)
        raw.config_set("appendonly", "no")
        raw.config_set("save", "60 1")  # snapshots only
        assert check_of("persistence")[0] is CheckResult.WARN
        raw.config_set("min-replicas-to-write", 1)
        verdict, said = check_of("role")
        assert (verdict, "refuses writes" in said) == (CheckResult.FAIL, True)
        raw.config_set("min-replicas-to-write", 0)
        raw.execute_command("ACL", "SETUSER", "elsewhere", "on", ">pw", "~x:*", "&*", "+@all")
    other = verdicts(own_server.url.replace("//", "//elsewhere:pw@"))
    assert other["rights"].verdict is other["scripts"].verdict is CheckResult.FAIL


def test_a_replica_that_lacks_a_command(redis_url: str) -> None:
    port = redis_url.rpartition(":")[2].partition("/")[0]
    extra = ("--rename-command", "XCLAIM", "", "--replicaof", "127.0.0.1", port)
    with EmbeddedServer(extra=extra) as server:
        found = verdicts(server.url)
    assert found["commands"].verdict is CheckResult.FAIL
    assert "XCLAIM" in found["commands"].found
    assert found["role"].verdict is CheckResult.FAIL
    assert "primary" in found["role"].cure
