"""Each service of the manager, one step at a time, on real servers."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from lisa.core import presence, signals
from lisa.core.address import Address
from lisa.core.connection import Connection
from lisa.core.errors import ConfigError, LisaError
from lisa.core.keys import Keys
from lisa.core.message import Message
from lisa.core.store import SyncStore
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.open import Open
from lisa.core.transitions.undeclare import Undeclare
from lisa.manager.announcer import Announcer
from lisa.manager.expirer import Expirer
from lisa.manager.greeter import Greeter
from lisa.manager.plan import Plan, Schedules
from lisa.manager.promoter import LONGEST_PAUSE_S, Promoter
from lisa.manager.pulse import Pulse
from lisa.manager.reclaimer import GLANCE_S, Reclaimer
from lisa.manager.registry import Registry
from lisa.manager.sampler import DAY_MS, HOUR_MS, MINUTE_MS, Sampler
from lisa.manager.server_clock import ServerClock
from lisa.manager.sweeper import GONE_AFTER_MS, IDLE_AFTER_MS, Sweeper
from lisa.manager.trimmer import Trimmer
from lisa.manager.waker import Waker
from tests.roles import Cast
from tests.servers import connect, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import redis
    from blinker import Signal


@pytest.fixture
def cast(server: str) -> Iterator[Cast]:
    cast = Cast(server).declare()
    yield cast
    cast.store.close()


@pytest.fixture
def raw(server: str) -> Iterator[redis.Redis]:
    """A foreign hand."""
    with connect(server) as client:
        yield client


@pytest.fixture
def kit(cast: Cast) -> SimpleNamespace:
    store, clock = cast.store, ServerClock()
    clock.sample(store)
    announcer = Announcer(store)
    expirer = Expirer(store, announcer)
    return SimpleNamespace(
        clock=clock,
        announcer=announcer,
        promoter=Promoter(store, clock, expirer, lambda _: 100),
        reclaimer=Reclaimer(store, announcer, 10),
        trimmer=Trimmer(store),
        sweeper=Sweeper(store, expirer, lambda topic: topic == "configured"),
        sampler=Sampler(store),
    )


@pytest.fixture
def heard() -> Iterator[dict[str, list[Message]]]:
    """What the module-wide signals carried, by name."""
    found: dict[str, list[Message]] = {"retrying": [], "dead": [], "expired": []}
    kept: list[tuple[Signal, Any]] = []
    for name, messages in found.items():
        signal = getattr(signals.everywhere, name)

        def receive(topic: str, *, message: Message, into: list[Message] = messages) -> None:
            into.append(message)

        signal.connect(receive)
        kept.append((signal, receive))
    yield found
    for signal, receiver in kept:
        signal.disconnect(receiver)


class TestPromoter:
    def test_moves_what_is_due_and_names_the_next_instant(
        self, cast: Cast, kit: SimpleNamespace
    ) -> None:
        due, later = cast.send_due(), cast.send(delay_ms=400)
        (at,) = kit.promoter.step(["orders"])
        assert (cast.state(due), cast.state(later)) == ("ready", "waiting")
        due_ms = cast.look(later).waiting_due_ms
        assert due_ms is not None
        assert at == pytest.approx(kit.clock.instant(due_ms), abs=0.005)
        time.sleep(max(0.0, at - time.monotonic()))
        assert kit.promoter.step(["orders"]) == [None]
        assert cast.state(later) == "ready"

    def test_drains_in_calls_of_one_batch_that_follow_at_once(
        self, cast: Cast, kit: SimpleNamespace
    ) -> None:
        for _ in range(250):
            cast.send_due()
        for _ in range(2):
            (at,) = kit.promoter.step(["orders"])
            assert at is not None
            assert at <= time.monotonic()
        assert kit.promoter.step(["orders"]) == [None]
        assert cast.store.ask("XLEN", cast.own.ready) == 250

    def test_a_full_group_is_asked_again_after_pauses_that_grow(
        self, cast: Cast, kit: SimpleNamespace
    ) -> None:
        cast.configure(max_ready="10")
        for _ in range(30):
            cast.send_due()
        pauses = []
        for _ in range(7):
            before = time.monotonic()
            (at,) = kit.promoter.step(["orders"])
            pauses.append(at - before)
        assert pauses[0] < 0.010
        assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S, abs=0.010)
        for _ in range(2):
            assert len(cast.take(10)) == 10
            kit.promoter.step(["orders"])
        assert len(cast.take(10)) == 10
        assert cast.store.ask("ZCARD", cast.keys.waiting) == 0

    def test_nothing_while_paused(self, cast: Cast, kit: SimpleNamespace) -> None:
        due = cast.send_due()
        cast.configure(paused="1")
        assert kit.promoter.step(["orders"]) == [None]
        assert cast.state(due) == "waiting"
        cast.configure(paused="0")
        kit.promoter.step(["orders"])
        assert cast.state(due) == "ready"

    def test_ends_at_once_what_is_past_its_ttl(
        self, cast: Cast, kit: SimpleNamespace, heard: dict[str, list[Message]]
    ) -> None:
        late = cast.send({"n": 1}, delay_ms=20, ttl_ms=1)
        fine = cast.send(delay_ms=20)
        time.sleep(0.05)
        kit.promoter.step(["orders"])
        assert (cast.state(late), cast.state(fine)) == ("expired", "ready")
        assert kit.announcer.step() == 1
        (message,) = heard["expired"]
        assert (message.id, message.body, message.group) == (late, {"n": 1}, "g")

    def test_one_topics_broken_key_concerns_that_topic_only(
        self, cast: Cast, kit: SimpleNamespace, raw: redis.Redis
    ) -> None:
        broken = cast.on("broken").declare()
        broken.send_due()
        raw.delete(broken.keys.waiting)
        raw.set(broken.keys.waiting, "not a sorted set")
        due = cast.send_due()
        outcomes = kit.promoter.step(["broken", "orders"])
        assert isinstance(outcomes[0], LisaError)
        assert "WRONGTYPE" in str(outcomes[0])
        assert outcomes[1] is None
        assert cast.state(due) == "ready"

    def test_a_flushed_script_cache_is_no_trouble(
        self, cast: Cast, kit: SimpleNamespace, raw: redis.Redis
    ) -> None:
        other = cast.on("other").declare()
        ids = [cast.send_due(), other.send_due()]
        raw.script_flush()
        assert kit.promoter.step(["orders", "other"]) == [None, None]
        assert [cast.state(ids[0]), other.state(ids[1])] == ["ready", "ready"]


class TestReclaimer:
    def test_takes_back_when_the_lease_ends_and_sleeps_until_then(
        self, cast: Cast, kit: SimpleNamespace, heard: dict[str, list[Message]]
    ) -> None:
        cast.configure(ack_timeout="300", retry_delays="60000")
        sent = cast.send({"n": 1})
        cast.take()
        began = time.monotonic()
        (at,) = kit.reclaimer.step(["orders"])
        assert at == pytest.approx(began + 0.3, abs=0.05)
        assert cast.state(sent) == "in_flight"
        time.sleep(max(0.0, at - time.monotonic()))
        before_ms = cast.now_ms()
        kit.reclaimer.step(["orders"])
        (place,) = cast.look(sent).places
        assert (place.state, place.failed_attempts, place.reason) == ("retry", 1, "ack timeout")
        assert place.due_ms is not None
        assert before_ms + 60_000 <= place.due_ms <= cast.now_ms() + 60_000
        kit.announcer.step()
        (message,) = heard["retrying"]
        assert (message.id, message.body, message.attempt) == (sent, {"n": 1}, 1)
        assert (message.next_due_ms, message.reason) == (place.due_ms, "ack timeout")
        assert heard["dead"] == []

    def test_the_last_attempt_ends_in_garbage(
        self, cast: Cast, kit: SimpleNamespace, heard: dict[str, list[Message]]
    ) -> None:
        cast.configure(ack_timeout="10", retry_delays="")
        sent = cast.send()
        cast.take()
        time.sleep(0.02)
        kit.reclaimer.step(["orders"])
        assert cast.state(sent) == "garbage"
        kit.announcer.step()
        assert [message.id for message in heard["dead"]] == [sent]

    def test_goes_to_the_end_of_the_list_in_one_step(
        self, cast: Cast, kit: SimpleNamespace
    ) -> None:
        cast.configure(ack_timeout="10", retry_delays="60000")
        for _ in range(35):
            cast.send()
        cast.take()
        time.sleep(0.02)
        kit.reclaimer.step(["orders"])
        assert cast.store.ask("ZCARD", cast.own.retry) == 35

    def test_a_lease_of_its_own_that_is_shorter_is_seen_in_time(
        self, cast: Cast, kit: SimpleNamespace
    ) -> None:
        cast.configure(ack_timeout="3600000")
        cast.send()
        cast.take()
        kit.reclaimer.step(["orders"])  # the full look: nothing ends within the hour
        sent = cast.send()
        cast.store.call(Open("orders", "g", cast.read(), 50))
        (at,) = kit.reclaimer.step(["orders"])
        assert at <= time.monotonic() + 0.06
        time.sleep(0.06)
        (at,) = kit.reclaimer.step(["orders"])
        assert cast.state(sent) == "retry"
        assert at <= time.monotonic() + GLANCE_S

    def test_after_an_outage_it_waits_one_ack_timeout(
        self, cast: Cast, kit: SimpleNamespace
    ) -> None:
        cast.configure(ack_timeout="200")
        sent = cast.send()
        cast.take()
        time.sleep(0.25)
        came_back = time.monotonic()
        kit.reclaimer.hold(came_back)
        assert kit.reclaimer.step(["orders"]) == [pytest.approx(came_back + 0.2)]
        kit.reclaimer.look_at_all()  # the cron does not cut it short
        kit.reclaimer.step(["orders"])
        assert cast.state(sent) == "in_flight"
        time.sleep(0.2)
        kit.reclaimer.step(["orders"])
        assert cast.state(sent) == "retry"

    def test_a_group_that_was_removed_is_no_trouble(
        self, cast: Cast, kit: SimpleNamespace
    ) -> None:
        kit.reclaimer.step(["orders"])
        Cast(cast.store.connection.address.url).store.call(Undeclare("orders", "g", [], True))
        (at,) = kit.reclaimer.step(["orders"])
        assert at <= time.monotonic() + GLANCE_S
        assert cast.store.known_groups("orders") == ()

    def test_one_topics_broken_key_concerns_that_topic_only(
        self, cast: Cast, kit: SimpleNamespace, raw: redis.Redis
    ) -> None:
        broken = cast.on("broken").declare()
        raw.delete(broken.own.ready)
        raw.set(broken.own.ready, "not a stream")
        cast.configure(ack_timeout="10")
        sent = cast.send()
        cast.take()
        time.sleep(0.02)
        outcomes = kit.reclaimer.step(["broken", "orders"])
        assert isinstance(outcomes[0], LisaError)
        assert cast.state(sent) == "retry"


class TestTrimmer:
    def test_removes_foreign_entries_and_nothing_else(
        self, cast: Cast, kit: SimpleNamespace, raw: redis.Redis
    ) -> None:
        held = cast.send()
        cast.take()
        foreign = raw.xadd(cast.own.ready, {"msg": "INIT"})
        raw.xreadgroup("g", "other", {cast.own.ready: ">"})
        raw.xack(cast.own.ready, "g", foreign)
        unread = [cast.send() for _ in range(30)]
        kit.trimmer.step("orders")
        assert cast.store.ask("XLEN", cast.own.ready) == 31
        assert cast.state(held) == "in_flight"
        assert {cast.state(one) for one in unread} == {"ready"}
        assert cast.stats()["trimmed@g"] == 1

    def test_messages_whose_entries_a_foreign_hand_took_are_due_again(
        self, cast: Cast, kit: SimpleNamespace, raw: redis.Redis
    ) -> None:
        sent = [cast.send() for _ in range(5)]
        raw.xtrim(cast.own.ready, maxlen=2, approximate=False)
        kit.trimmer.step("orders")
        assert [cast.state(one) for one in sent] == ["retry"] * 3 + ["ready"] * 2
        kit.promoter.step(["orders"])
        assert sorted(entry.id for entry in cast.take()) == sorted(sent)

    def test_a_stream_that_was_deleted_is_declared_again(
        self, cast: Cast, kit: SimpleNamespace, raw: redis.Redis
    ) -> None:
        sent = cast.send()
        raw.delete(cast.own.ready)
        kit.trimmer.step("orders")
        kit.promoter.step(["orders"])
        assert [entry.id for entry in cast.take()] == [sent]


class TestSweeper:
    def test_ends_messages_past_their_ttl_past_those_in_flight(
        self, cast: Cast, kit: SimpleNamespace
    ) -> None:
        flying = cast.send(ttl_ms=30)
        cast.take()
        ready = cast.send(ttl_ms=1)
        lasting = cast.send(ttl_ms=60_000)
        time.sleep(0.05)
        kit.sweeper.step("orders")
        assert [cast.state(one) for one in (flying, ready, lasting)] == [
            "in_flight", "expired", "ready",
        ]  # fmt: skip

    def test_forgets_dead_consumers_with_nothing_pending(
        self, cast: Cast, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lisa.manager.sweeper.GONE_AFTER_MS", 40)
        cast.send()
        cast.take(consumer="holds")
        for name in ("idle", "alive"):
            cast.store.ask("XGROUP", "CREATECONSUMER", cast.own.ready, "g", name)
        self.announce(cast, "holds", group="g")
        self.announce(cast, "idle", group="g")
        self.announce(cast, "never-read", group="g")
        self.announce(cast, "waits", group="")
        time.sleep(0.06)
        self.announce(cast, "alive", group="g")
        kit.sweeper.step("orders")
        known = cast.store.ask("XINFO", "CONSUMERS", cast.own.ready, "g")
        assert sorted(info[1] for info in known) == [b"alive", b"holds"]
        left = cast.store.drive(presence.consumers(cast.store, "orders"))
        assert [record.name for record in left] == ["alive", "holds"]

    @staticmethod
    def announce(cast: Cast, name: str, *, group: str) -> None:
        record = presence.ConsumerPresence(name=name, topic="orders", group=group)
        cast.store.drive(presence.announce_consumer(cast.store, record))

    def test_a_live_consumer_that_reads_rarely_keeps_its_name(
        self, cast: Cast, kit: SimpleNamespace, raw: redis.Redis
    ) -> None:
        raw.xgroup_createconsumer(cast.own.ready, "g", "fresh")
        kit.sweeper.step("orders")  # idle for less than GONE_AFTER, and no record at all
        known = cast.store.ask("XINFO", "CONSUMERS", cast.own.ready, "g")
        assert [info[1] for info in known] == [b"fresh"]
        assert GONE_AFTER_MS == 30_000

    def test_purges_old_garbage_only(self, cast: Cast, kit: SimpleNamespace) -> None:
        cast.configure(garbage_keep="100")
        old = cast.send()
        cast.discard(cast.take()[0])
        time.sleep(0.12)
        young = cast.send()
        cast.discard(cast.take()[0])
        kit.sweeper.step("orders")
        assert (cast.state(old), cast.state(young)) == ("purged", "garbage")
        assert cast.store.ask("EXISTS", cast.keys.body(old)) == 0

    def test_unregisters_an_idle_topic_and_only_that(
        self, cast: Cast, kit: SimpleNamespace, raw: redis.Redis
    ) -> None:
        long_ago = cast.now_ms() - IDLE_AFTER_MS - 1_000
        for topic in ("idle", "busy", "configured", "orders"):
            cast.on(topic).declare()
        cast.on("busy").send(delay_ms=60_000)
        cast.store.drive(cast.store.register(["fresh"]))
        for topic in ("idle", "busy", "configured"):
            raw.zadd(cast.store.keys.topics, {topic: long_ago})
        gone = [one for one in ("idle", "busy", "configured", "fresh") if kit.sweeper.step(one)]
        assert gone == ["idle"]
        assert cast.store.drive(cast.store.topics()) == ["busy", "configured", "fresh"]

    def test_looks_again_after_the_removal(
        self,
        cast: Cast,
        kit: SimpleNamespace,
        raw: redis.Redis,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        raw.zadd(cast.store.keys.topics, {"orders": 1})
        looks = []

        def sends_meanwhile(topic: str, groups: tuple[str, ...]) -> bool:
            looks.append(topic)
            return len(looks) > 1

        monkeypatch.setattr(kit.sweeper, "_is_used", sends_meanwhile)
        assert kit.sweeper.step("orders") is False
        assert cast.store.drive(cast.store.topics()) == ["orders"]

    def test_records_of_managers_that_are_gone(
        self, cast: Cast, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = cast.store
        monkeypatch.setattr("lisa.manager.sweeper.GONE_AFTER_MS", 40)
        store.drive(presence.announce_manager(store, presence.ManagerPresence(name="old")))
        time.sleep(0.06)
        store.drive(presence.announce_manager(store, presence.ManagerPresence(name="new")))
        kit.sweeper.managers()
        assert [one.name for one in store.drive(presence.managers(store))] == ["new"]


class TestSampler:
    NOON = 1_900_000_800_000 - 1_900_000_800_000 % DAY_MS

    def test_several_managers_write_one_sample_a_minute(
        self, cast: Cast, kit: SimpleNamespace
    ) -> None:
        cast.send()
        assert kit.sampler.step("orders", self.NOON + 2_000)
        cast.send()
        assert not Sampler(cast.store).step("orders", self.NOON + 3_000)
        assert Sampler(cast.store).step("orders", self.NOON + MINUTE_MS)
        entries = cast.store.ask("XRANGE", cast.keys.history, "-", "+")
        assert [entry for entry, _ in entries] == [
            f"{self.NOON}-0".encode(), f"{self.NOON + MINUTE_MS}-0".encode(),
        ]  # fmt: skip
        assert dict(zip(entries[1][1][::2], entries[1][1][1::2], strict=True))[b"sent"] == b"2"

    def test_two_that_race_for_a_minute(self, cast: Cast, kit: SimpleNamespace) -> None:
        assert kit.sampler._add(cast.keys.history, self.NOON, [b"sent", b"1"])
        assert not kit.sampler._add(cast.keys.history, self.NOON, [b"sent", b"1"])

    def test_nothing_is_written_while_nothing_changes(
        self, cast: Cast, kit: SimpleNamespace
    ) -> None:
        assert not kit.sampler.step("orders", self.NOON)
        cast.send()
        assert kit.sampler.step("orders", self.NOON)
        assert not kit.sampler.step("orders", self.NOON + MINUTE_MS)

    def test_minutes_for_seven_days_hours_for_ninety(
        self, cast: Cast, kit: SimpleNamespace
    ) -> None:
        def at(**ago: int) -> int:
            return self.NOON - int(timedelta(**ago).total_seconds() * 1_000)

        old = [at(days=8) + minute * MINUTE_MS for minute in range(-90, 31)]
        pipe = [at(days=91), *old, *[at(days=6) + minute * MINUTE_MS for minute in range(3)]]
        for number, ms in enumerate(pipe):
            cast.store.ask("XADD", cast.keys.history, f"{ms}-0", "sent", number)
        cast.send()
        kit.sampler.step("orders", self.NOON)
        kept = [
            int(entry.split(b"-")[0])
            for entry, _ in cast.store.ask("XRANGE", cast.keys.history, "-", "+")
        ]
        hours = [at(days=8, hours=1), at(days=8), at(days=8) + 30 * MINUTE_MS]
        recent = [at(days=6) + minute * MINUTE_MS for minute in range(3)]
        assert [ms for ms in kept if ms > at(days=90)] == [*hours, *recent, self.NOON]
        assert HOUR_MS * 24 == DAY_MS


def registry(cast: Cast, **topics: dict[str, object]) -> Registry:
    plan = Plan.of(topics, {}, default_group="lisa", schedules=Schedules())
    return Registry(cast.store, plan, lambda _: None)


class TestRegistry:
    def test_learns_configured_and_registered_topics(self, cast: Cast) -> None:
        learnt: list[str] = []
        plan = Plan.of(["a"], {}, default_group="lisa", schedules=Schedules())
        made = Registry(cast.store, plan, learnt.append)
        cast.on("sent").send(delay_ms=60_000)
        made.step()
        made.step()
        made.learn(["not a topic", "sent"])
        assert made.topics == ["a", "sent"]
        assert learnt == ["a", "sent"]
        assert cast.store.drive(cast.store.topics()) == ["a", "sent"]
        assert cast.store.drive(cast.store.groups("a")) == ()  # nobody named one

    def test_declares_options_and_groups_but_what_an_operator_set_lasts(self, cast: Cast) -> None:
        registry(cast, a={"ack_timeout": "1s", "max_ready": 5, "group": "x"}).step()
        cast.store.call(Configure("a", {"max_ready": "7"}))
        registry(cast, a={"ack_timeout": "2s", "max_ready": 6}).step()
        options = cast.store.drive(cast.store.options("a"))
        assert (options.ack_timeout, options.max_ready) == (timedelta(seconds=2), 7)
        assert cast.store.drive(cast.store.groups("a")) == ("x",)

    def test_takes_back_what_is_declared_no_more(self, cast: Cast) -> None:
        registry(cast, a={"ack_timeout": "1s"}).step()
        registry(cast, a={}).step()
        assert cast.store.drive(cast.store.options("a")).ack_timeout == timedelta(seconds=10)

    def test_a_broken_topic_stops_no_other_and_is_tried_again(
        self, cast: Cast, raw: redis.Redis
    ) -> None:
        options = cast.store.keys.topic("a").options
        raw.set(options, "not a hash")
        made = registry(cast, a={"max_ready": 5}, b={"max_ready": 5})
        made.step()
        assert made.topics == ["a", "b"]
        assert made.troubles.of("a") is not None
        assert cast.store.drive(cast.store.options("b")).max_ready == 5
        raw.delete(options)
        made.step()
        assert made.troubles.of("a") is None
        assert cast.store.drive(cast.store.options("a")).max_ready == 5

    def test_a_search_finds_topics_that_nobody_listed(
        self, cast: Cast, raw: redis.Redis
    ) -> None:
        cast.on("waits").send(delay_ms=60_000)
        retries = cast.on("retries").declare(retry_delays="60000", ack_timeout="1")
        retries.send()
        retries.take()
        time.sleep(0.01)
        Reclaimer(cast.store, Announcer(cast.store), 10).step(["retries"])
        cast.on("empty").declare()
        raw.delete(cast.store.keys.topics)
        made = registry(cast)
        made.search()
        assert made.topics == ["retries", "waits"]
        assert cast.store.drive(cast.store.topics()) == ["retries", "waits"]

    def test_another_plan_is_followed(self, cast: Cast) -> None:
        made = registry(cast, a={"max_ready": 5})
        made.step()
        plan = Plan.of(
            {"a": {"max_ready": 6}, "b": {"group": "x"}},
            {}, default_group="lisa", schedules=Schedules(),
        )  # fmt: skip
        assert made.reconfigure(plan) == [
            "topic a: max_ready 5 -> 6", "topic b: new", "topic b: group x added",
        ]  # fmt: skip
        made.step()
        assert cast.store.drive(cast.store.options("a")).max_ready == 6
        assert cast.store.drive(cast.store.groups("b")) == ("x",)


class TestGreeter:
    def test_messages_alone_declare_nothing_a_waiting_consumer_does(self, cast: Cast) -> None:
        other = cast.on("mails")
        other.send()
        greeter = Greeter(cast.store, registry(cast))
        (at,) = greeter.step(["mails"])
        assert at is not None
        assert cast.store.drive(cast.store.groups("mails")) == ()
        self.wait_for_group(cast, "mails")
        assert greeter.step(["mails"]) == [None]
        assert cast.store.drive(cast.store.groups("mails")) == ("lisa",)

    def test_it_declares_the_group_that_the_configuration_names(self, cast: Cast) -> None:
        self.wait_for_group(cast, "mails")
        Greeter(cast.store, registry(cast, mails={"group": "post"})).step(["mails"])
        assert cast.store.drive(cast.store.groups("mails")) == ("post",)

    def test_a_record_of_one_that_is_gone_declares_nothing(
        self, cast: Cast, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.wait_for_group(cast, "mails")
        monkeypatch.setattr("lisa.manager.greeter.GONE_AFTER", timedelta(milliseconds=10))
        time.sleep(0.02)
        Greeter(cast.store, registry(cast)).step(["mails"])
        assert cast.store.drive(cast.store.groups("mails")) == ()

    @staticmethod
    def wait_for_group(cast: Cast, topic: str) -> None:
        record = presence.ConsumerPresence(name="c", topic=topic)
        cast.store.drive(presence.announce_consumer(cast.store, record))


class TestWaker:
    def test_hears_and_says_when_it_was_deaf(self, cast: Cast, raw: redis.Redis) -> None:
        woken: list[str] = []
        gaps: list[int] = []
        waker = Waker(
            cast.store.connection, cast.store.keys.wake, woken.append, lambda: gaps.append(1)
        )
        try:
            assert waker.step() == 0.0
            assert gaps == [1]
            cast.send(delay_ms=60_000)
            wait_until(lambda: waker.step() == 0.0 and woken)
            assert woken == ["orders"]
            raw.client_kill_filter(_type="pubsub")
            wait_until(lambda: waker.step() == 0.0 and len(gaps) == 2)
            raw.publish(cast.store.keys.wake, "orders")
            wait_until(lambda: waker.step() == 0.0 and len(woken) >= 2)
        finally:
            waker.stop()


class TestPulse:
    def test_first_same_and_emptied(self, cast: Cast, raw: redis.Redis) -> None:
        pulse = Pulse(cast.store, ServerClock())
        first = pulse.step()
        assert first is not None
        assert (first.first, first.back, first.another_run, first.emptied) == (
            True, True, False, False,
        )  # fmt: skip
        pulse.here()
        same = pulse.step()
        assert same is not None
        assert not (same.first or same.back or same.another_run or same.emptied)
        raw.flushall()
        emptied = pulse.step()
        assert emptied is not None
        assert emptied.emptied

    def test_a_newer_layout_is_refused(self, cast: Cast, raw: redis.Redis) -> None:
        raw.set(cast.store.keys.schema, "99")
        pulse = Pulse(cast.store, ServerClock())
        with pytest.raises(ConfigError, match="layout 99"):
            pulse.step()
        assert not pulse.reachable.is_set()

    def test_a_server_that_is_away_is_told_once(self, caplog: pytest.LogCaptureFixture) -> None:
        nobody = Connection(Address("redis://127.0.0.1:1/0"))
        store = SyncStore(nobody, Keys(), patience=timedelta(milliseconds=10))
        pulse = Pulse(store, ServerClock())
        assert [pulse.step() for _ in range(3)] == [None, None, None]
        assert len(caplog.records) == 1
        assert pulse.trouble is not None


class TestAnnouncer:
    def test_receivers_of_all_kinds_and_one_that_raises(
        self, cast: Cast, kit: SimpleNamespace, caplog: pytest.LogCaptureFixture
    ) -> None:
        seen: list[str] = []
        seen_by: list[str] = []

        def plain(topic: str, *, message: Message) -> None:
            seen.append(message.id)
            seen_by.append(threading.current_thread().name)

        async def coroutine(topic: str, *, message: Message) -> None:
            seen.append(message.id)

        def raises(topic: str, *, message: Message) -> None:
            raise ValueError("boom")

        receivers = (raises, plain, coroutine)
        for receiver in receivers:
            signals.everywhere.retrying.connect(receiver, sender="orders")
        kit.announcer.start()
        try:
            cast.configure(ack_timeout="10", retry_delays="60000")
            sent = cast.send()
            cast.take()
            time.sleep(0.02)
            kit.reclaimer.step(["orders"])
            wait_until(lambda: len(seen) == 2)
        finally:
            kit.announcer.stop()
            for receiver in receivers:
                signals.everywhere.retrying.disconnect(receiver, sender="orders")
        assert seen == [sent, sent]
        assert seen_by == ["lisa-announcer"]
        assert "boom" in caplog.text
