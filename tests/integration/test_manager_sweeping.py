"""Sweeper and sampler, one step at a time, on real servers."""

import gc
import logging
import threading
import time
from datetime import timedelta
from functools import lru_cache
from types import FunctionType, ModuleType

import msgspec
import pytest
import redis
from msgspec.structs import replace

from lisa.core.model.errors import LisaError
from lisa.core.redis.address import Address
from lisa.core.store import presence
from lisa.core.store.registration import IDLE_AFTER_MS
from lisa.core.transitions.groups import Declare, Undeclare
from lisa.manager.engine import Engine
from lisa.manager.plan import Plan, Schedules
from lisa.manager.sampler import DAY_MS, HOUR_MS, MINUTE_MS, Sampler
from tests.roles import Cast, Services


@pytest.fixture
def server(redis_url: str) -> str:
    """The embedded server alone: tests/contract runs the scripts on each kind of server."""
    return redis_url


class TestSweeper:
    def test_ends_expired_messages_on_all_pages(
        self, cast: Cast, kit: Services, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lisa.manager.sweeper.PAGE", 2)
        flying = cast.send(ttl_ms=1)
        cast.take()
        sent = [cast.send(ttl_ms=2) for _ in range(6)]
        lasting = cast.send(ttl_ms=600_000)
        time.sleep(0.05)
        kit.sweeper.step("orders")
        assert cast.states(sent) == ["expired"] * 6
        assert cast.states([flying, lasting]) == ["in_flight", "ready"]

    def test_finishes_the_removal_of_a_group_that_was_cut_short(
        self, cast: Cast, kit: Services, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("WARNING")
        ready, waiting = cast.send(), cast.send(delay_ms=60_000)
        cast.store.call(Undeclare("orders", "g"))  # and its process is killed
        before = cast.ask("HLEN", cast.own.entries)
        assert kit.sweeper.pick(["orders"]) == ["orders"]
        kit.sweeper.step("orders")
        assert cast.ask("HLEN", cast.own.entries) == before == 1, "it may be at work still"
        cast.configure(**{"removing:g": "1"})
        kit.sweeper.step("orders")
        assert (cast.state(ready), cast.state(waiting)) == ("purged", "waiting")
        assert not cast.ask("EXISTS", cast.keys.options, *cast.own)
        assert "finished an interrupted removal of the group: 1 " in caplog.text
        assert kit.sweeper.pick(["orders"]) == []
        assert cast.store.call(Declare("orders", "g"))

    def test_a_removal_that_owes_much_is_finished_a_part_each_run(
        self,
        cast: Cast,
        kit: Services,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level("WARNING")
        monkeypatch.setattr("lisa.core.store.group_removal.MOST_IDS", 1)
        monkeypatch.setattr("lisa.manager.sweeper.MOST_CALLS", 40)
        for _ in range(81):
            cast.send()
        cast.store.call(Undeclare("orders", "g"))
        owed = list[int]()
        for _ in range(3):
            cast.configure(**{"removing:g": "1"})
            kit.sweeper.step("orders")
            owed.append(cast.ask("HLEN", cast.own.entries))
            kit.sweeper.step("orders")
        assert owed == [41, 1, 0], "one part; the mark is fresh until a minute has passed"
        lines = [record.getMessage().partition(": ")[2] for record in caplog.records]
        part = "continued an interrupted removal of the group: 40 messages settled"
        last = "finished an interrupted removal of the group: 1 messages settled"
        assert lines == [part, part, last]

    def test_forgets_dead_managers_and_dead_consumers_with_nothing_pending(
        self, cast: Cast, kit: Services, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lisa.core.store.presence.GONE_AFTER_MS", 0)
        cast.send()
        cast.take(consumer="holds")
        for name in ("idle", "alive"):
            cast.ask("XGROUP", "CREATECONSUMER", cast.own.ready, "g", name)
        for name, group in {"holds": "g", "idle": "g", "never-read": "g", "waits": ""}.items():
            record = presence.ConsumerPresence(name=name, topic="orders", group=group)
            cast.drive(presence.announce_consumer(cast.store, record))
        record = replace(record, name="alive", group="g", seen_ms=cast.now_ms() + MINUTE_MS)
        cast.ask("HSET", cast.keys.consumers, "alive", msgspec.json.encode(record))
        cast.drive(presence.announce_manager(cast.store, presence.ManagerPresence(name="old")))
        manager = presence.ManagerPresence(name="new", seen_ms=record.seen_ms)
        cast.ask("HSET", cast.store.keys.managers, "new", msgspec.json.encode(manager))
        # The records of relays are kept for a day where no other relay serves the table.
        now_ms = cast.now_ms()
        for name, table, seen_ms in (
            ("old", "a", now_ms),
            ("new", "a", now_ms + MINUTE_MS),
            ("late", "b", now_ms - HOUR_MS),
            ("lost", "c", now_ms - 25 * HOUR_MS),
        ):
            relay = presence.RelayPresence(name=name, table=table, seen_ms=seen_ms)
            cast.ask("HSET", cast.store.keys.relays, name, msgspec.json.encode(relay))
        kit.sweeper.step("orders")
        kit.sweeper.managers()
        assert [one.name for one in cast.drive(presence.managers(cast.store))] == ["new"]
        assert [one.name for one in cast.drive(presence.relays(cast.store))] == ["late", "new"]
        monkeypatch.undo()
        cast.ask("XGROUP", "CREATECONSUMER", cast.own.ready, "g", "fresh")
        kit.sweeper.step("orders")  # it may read rarely, and has no record yet
        known = cast.ask("XINFO", "CONSUMERS", cast.own.ready, "g")
        assert sorted(info[1] for info in known) == [b"alive", b"fresh", b"holds"]
        left = cast.drive(presence.consumers(cast.store, "orders"))
        assert [record.name for record in left] == ["alive", "holds"]

    def test_l15_garbage_is_purged_after_its_time_and_leaves_nothing(
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        """Another program wrote members that are not ids; a page of them is older."""
        foreign = [part for n in range(250) for part in (1, b"\xff%d" % n)]
        cast.ask("ZADD", cast.own.garbage, *foreign)
        cast.configure(garbage_keep="60000", retention="0")
        sent = cast.send({"n": 1}, ttl_ms=60_000, policy="")
        cast.discard(cast.take()[0])
        kit.sweeper.step("orders")
        assert cast.state(sent) == "garbage"
        cast.configure(garbage_keep="1")
        time.sleep(0.01)
        kit.sweeper.step("orders")
        left = {bytes(key).decode().removeprefix(cast.keys.root) for key in raw.scan_iter()}
        left = {key for key in left if not key.startswith(("lisa:", "reply:"))}
        assert left == {"options", "groups", "stats", "g:g:ready"}

    def test_unregisters_an_idle_topic_and_only_that(
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        long_ago = cast.now_ms() - IDLE_AFTER_MS - 1_000
        for topic in ("idle", "busy", "configured", "daily"):
            cast.on(topic).declare()
        # A manager creates its next occurrence, and lists no topics.
        raw.hset(cast.store.keys.topic("daily").schedules, "daily", "1.5.1 {}")
        cast.on("busy").send(delay_ms=60_000)
        cast.drive(cast.store.register(["fresh"]))
        old = ["busy", "configured", "daily", "idle"]
        raw.zadd(cast.store.keys.topics, dict.fromkeys(old, long_ago))
        assert [one for one in (*old, "fresh") if kit.sweeper.step(one)] == ["idle"]
        assert cast.drive(cast.store.topics()) == ["busy", "configured", "daily", "fresh"]

    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_a_topic_that_is_sent_to_while_it_is_forgotten_is_not_lost(
        self,
        server: str,
        cast: Cast,
        raw: redis.Redis,
        monkeypatch: pytest.MonkeyPatch,
        moment: str,
    ) -> None:
        plan = Plan.of((), {}, default_group="lisa", schedules=Schedules())
        engine = Engine(Address(server), plan, cast.store.keys.prefix, "m")
        registry, forget = engine.registry, engine.registry.forget

        def send() -> None:
            cast.send(delay_ms=60_000)
            raw.zrem(cast.store.keys.topics, "orders")  # the sender had registered it long ago
            engine.woken("", "orders")

        def forget_and_send(topic: str) -> None:
            if moment == "before":
                send()
            forget(topic)
            if moment == "after":
                send()

        monkeypatch.setattr(registry, "forget", forget_and_send)
        registry.learn(["orders"])
        raw.zadd(cast.store.keys.topics, {"orders": 1})
        engine.sweep("orders")
        assert registry.topics == ["orders"]
        heaps = [loop.due_heap for loop in engine.loops]
        assert [heap.exchange((), 1) for heap in heaps if heap.overdue_s() > 0] == [["orders"]] * 3
        engine.store.close()

    def test_nothing_is_kept_of_a_topic_that_another_manager_unlisted(
        self, server: str, cast: Cast, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All services have worked on it, and each has recorded an error of it."""
        monkeypatch.setattr("lisa.manager.idle_topics.FEW", 0)
        plan = Plan.of((), {}, default_group="lisa", schedules=Schedules())
        engine = Engine(Address(server), plan, cast.store.keys.prefix, "m")
        jobs = engine.jobs
        try:
            engine.nodes._nodes[""].probe()
            cast.send()
            engine.registry.learn(["orders"])
            engine.scheduling.due_heap.add("orders")
            for loop in engine.loops:
                loop._run_step(loop.due_heap.exchange((), 9))
                loop.due_heap.exchange([("orders", None)], 0)
                loop.topic_errors.failed("orders", LisaError("x"))
            for job in jobs.by_name.values():
                job.work()
            for job in jobs.by_name.values():
                job.errors.failed("orders", LisaError("x"))
            cast.discard(cast.take()[0])
            cast.ask("DEL", cast.own.garbage, cast.keys.events)
            assert mentions(engine, "orders")
            # A topic of a list that cannot be read is not idle.
            monkeypatch.setattr(engine.sweeper, "_is_list_there", lambda: False)
            raw.delete(cast.store.keys.topics)
            jobs.by_name["sweep"].work()
            assert engine.registry.topics == ["orders"]
            monkeypatch.setattr(engine.sweeper, "_is_list_there", lambda: True)
            engine.idle.mark_active("orders")
            jobs.by_name["sweep"].work()
            engine.find_schedules()
            engine.pruner.pick([])
            # Reading the head of a heap drops outdated entries, which are few in any case.
            assert {loop.due_heap.overdue_s() for loop in engine.loops} == {0.0}
            assert mentions(engine, "orders") == []
        finally:
            engine.nodes.stop()
            engine.store.close()


def mentions(root: object, word: str) -> list[object]:
    """The objects within reach of `root` that contain a string."""
    bounded = type(lru_cache(len))
    ignored = (type, ModuleType, FunctionType, threading.Thread, logging.Logger, bounded)
    seen, left, found = set[int](), [root], list[object]()
    while left:
        one = left.pop()
        for part in gc.get_referents(one):
            if isinstance(part, str) and part == word:
                found.append(one)
            elif id(part) not in seen and not isinstance(part, ignored):
                seen.add(id(part))
                left.append(part)
    return found


def samples(cast: Cast) -> list[tuple[int, int]]:
    """The times of all samples, and the number of messages sent."""
    entries = cast.ask("XRANGE", cast.keys.history, "-", "+")
    return [
        (int(entry.split(b"-")[0]), int(fields[fields.index(b"sent") + 1]))
        for entry, fields in entries
    ]


class TestSampler:
    NOON = 1_700_000_000_000 - 1_700_000_000_000 % DAY_MS

    def test_several_managers_write_one_sample_a_minute(self, cast: Cast, kit: Services) -> None:
        cast.send()
        assert kit.sampler.step("orders", self.NOON + 2_000)
        cast.send()
        assert not Sampler(cast.store).step("orders", self.NOON + 3_000)
        assert Sampler(cast.store).step("orders", self.NOON + MINUTE_MS)
        assert samples(cast) == [(self.NOON, 1), (self.NOON + MINUTE_MS, 2)]
        assert not kit.sampler._add(cast.keys.history, self.NOON, [b"sent", b"1"]), "a race"
        assert not kit.sampler.step("orders", self.NOON + 2 * MINUTE_MS), "nothing has changed"

    def test_minutes_for_seven_days_hours_for_ninety(self, cast: Cast, kit: Services) -> None:
        def at(**ago: int) -> int:
            return self.NOON - int(timedelta(**ago).total_seconds() * 1_000)

        old = [at(days=8) + minute * MINUTE_MS for minute in range(-90, 31)]
        pipe = [at(days=91), *old, *[at(days=6) + minute * MINUTE_MS for minute in range(3)]]
        for number, ms in enumerate(pipe):
            cast.ask("XADD", cast.keys.history, f"{ms}-0", "sent", number)
        cast.send()
        kit.sampler.step("orders", self.NOON)
        hours = [at(days=8, hours=1), at(days=8), at(days=8) + 30 * MINUTE_MS]
        recent = [at(days=6) + minute * MINUTE_MS for minute in range(3)]
        kept = [ms for ms, _ in samples(cast) if ms > at(days=90)]
        assert kept == [*hours, *recent, self.NOON]

    def test_a_clock_that_was_ahead_for_a_while_costs_no_history(
        self, cast: Cast, kit: Services
    ) -> None:
        noon = cast.now_ms() // HOUR_MS * HOUR_MS - HOUR_MS
        usual = [noon + minute * MINUTE_MS for minute in range(3)]
        for ms in (*usual, noon + 8 * DAY_MS, noon + 3 * MINUTE_MS):
            cast.send()
            assert kit.sampler.step("orders", ms)
        expected = zip([*usual, noon + 3 * MINUTE_MS], (1, 2, 3, 5), strict=True)
        assert samples(cast) == list(expected)
        assert cast.ask("PTTL", cast.keys.history) == -1
