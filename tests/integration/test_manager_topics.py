"""A manager's state of topics and of its server: each part, one step at a time."""

import time
from datetime import timedelta
from typing import Any

import pytest
import redis

from lisa.admin.groups import remove
from lisa.admin.limits import set_limits
from lisa.core.model.errors import ConfigError
from lisa.core.model.lanes import KeyLimits
from lisa.core.redis.address import Address
from lisa.core.redis.connection import ChannelSubscription, Connection
from lisa.core.settings import ManagerSettings
from lisa.core.store import presence
from lisa.core.store.limits import read as read_limits
from lisa.core.transitions.topic import Configure
from lisa.embedded import EmbeddedServer
from lisa.manager.nodes import Node
from lisa.manager.plan import Plan, Schedules, differences
from lisa.manager.registry import Registry
from lisa.manager.server_clock import ServerClock
from lisa.manager.waker import Waker
from tests.proxies import HoldingProxy
from tests.roles import Cast, Services
from tests.servers import connect, open_store, wait_until


@pytest.fixture
def server(redis_url: str) -> str:
    return redis_url


def plan_of(**topics: dict[str, object]) -> Plan:
    return Plan.of(topics, {}, default_group="lisa", schedules=Schedules())


def registry(cast: Cast, **topics: dict[str, object]) -> Registry:
    return Registry(cast.store, plan_of(**topics), lambda _: None)


class TestRegistry:
    def test_declares_options_and_groups_and_keeps_what_an_operator_set(self, cast: Cast) -> None:
        a = cast.on("a")
        registry(cast, a={"ack_timeout": "1s", "max_ready": 5, "group": "x"}).step()
        a.configure(max_ready="7")
        registry(cast, a={"ack_timeout": "2s", "max_ready": 6}).step()
        assert (a.options().ack_timeout, a.options().max_ready) == (timedelta(seconds=2), 7)
        assert a.groups() == ("x",)
        registry(cast, a={}).step()  # no longer declared
        assert a.options().ack_timeout == timedelta(seconds=10)

    def test_declares_limits_of_keys_and_keeps_what_an_operator_set(self, cast: Cast) -> None:
        def declare(**limits: dict[str, object]) -> None:
            first = {"topic": "orders", "group": "x", "key-limits": limits}
            groups = [first, {"topic": "orders", "group": "y"}]
            plan = Plan.from_settings(ManagerSettings.load(groups=groups))
            made = Registry(cast.store, plan, lambda _: None)
            made.step()
            assert made.topic_errors.of("orders") is None

        def stored() -> dict[str, str]:
            return cast.store.drive(read_limits(cast.store, "orders"))

        weight: dict[str, object] = {"weight": 2}
        cast.store.drive(set_limits(cast.store, "orders", "own", KeyLimits(weight=9)))
        declare(a={"rate": "2/s", "concurrency": 4}, b=weight, c=weight, own=weight)
        given = {"a": "rate=2,1000,1;concurrency=4", "b": "weight=2", "c": "weight=2"}
        assert stored() == given | {"own": "weight=9"}
        cast.store.drive(set_limits(cast.store, "orders", "b", KeyLimits(weight=7)))
        declare(a={"weight": 3}, b={"weight": 3}, d=weight)  # and c no longer
        assert stored() == {"a": "weight=3", "b": "weight=7", "d": "weight=2", "own": "weight=9"}
        cast.store.drive(set_limits(cast.store, "orders", "b", KeyLimits()))
        declare(b={"weight": 3})
        assert stored() == {"b": "weight=3", "own": "weight=9"}
        declare()
        assert stored() == {"own": "weight=9"}
        assert cast.ask("HGET", cast.keys.options, "declared limits:b") is None

    def test_declares_limits_of_keys_in_one_group(self, cast: Cast) -> None:
        def stored(plan: Plan) -> dict[str, str]:
            made = Registry(cast.store, plan, lambda _: None)
            made.step()
            assert made.topic_errors.of("orders") is None
            return cast.store.drive(read_limits(cast.store, "orders"))

        weight = {"k": {"weight": 2}}
        x = {"topic": "orders", "group": "x", "key-limits": {"k": {"rate": "2/s"}}}
        y = {"topic": "orders", "group": "y", "group-options": {"key-limits": weight}}
        both = Plan.from_settings(ManagerSettings.load(groups=[x, y]))
        found = {"k": "rate=2,1000,1", "y\x1fk": "weight=2"}
        assert stored(both) == found
        assert cast.store.drive(cast.store.group_options("orders")) == {}
        options: dict[str, object] = {"groups": ["x", "y"], "key_limits": {"k": {"rate": "2/s"}}}
        of_y: dict[str, object] = {"key-limits@y": {"k": {"weight": 3}}}
        changed = plan_of(orders=options | of_y)
        assert differences(both, changed) == ["topic orders: limits of key k in group y changed"]
        assert stored(changed) == found | {"y\x1fk": "weight=3"}
        assert stored(plan_of(orders=options)) == {"k": "rate=2,1000,1"}
        # What was declared is forgotten with the group.
        stored(changed)
        cast.store.drive(remove(cast.store, "orders", "y"))
        assert cast.store.drive(read_limits(cast.store, "orders")) == {"k": "rate=2,1000,1"}
        assert cast.ask("HGET", cast.keys.options, "declared limits:y\x1fk") is None

    @pytest.mark.parametrize(
        "wrong", [{}, {"rate": "fast"}, {"weight": 0}, {"key_rate": "2/s"}, "2/s"]
    )
    def test_invalid_limits_of_keys_are_refused(self, wrong: object) -> None:
        of_group = {"group": "g", "group-options": {"key-limits": {"a": wrong}}}
        for given in ({"key-limits": {"a": wrong}}, {"key-limits": {"": {"weight": 1}}}, of_group):
            with pytest.raises(ConfigError):
                ManagerSettings.load(groups=[{"topic": "orders", **given}])
        for name, limits in (
            ("key_limits", {"a": wrong}),
            ("key_limits", "2/s"),
            ("key_limits", {"": {"weight": 1}}),
            ("key_limits@a b", {"a": {"weight": 1}}),
        ):
            with pytest.raises(ConfigError, match="key_limits"):
                plan_of(orders={name: limits})

    @pytest.mark.parametrize("broken", [("SET", "not a hash"), ("HSET", "schedules", "not JSON")])
    def test_a_broken_topic_does_not_stop_others_and_is_retried(
        self, cast: Cast, broken: tuple[str, ...]
    ) -> None:
        a = cast.on("a")
        cast.ask(broken[0], a.keys.options, *broken[1:])
        made = registry(cast, a={"max_ready": 5}, b={"max_ready": 5})
        made.step()
        assert made.topics == ["a", "b"]
        assert made.topic_errors.of("a") is not None
        assert cast.on("b").options().max_ready == 5
        cast.ask("DEL", a.keys.options)
        made.step()
        assert made.topic_errors.of("a") is None
        assert a.options().max_ready == 5

    def test_a_search_finds_unlisted_topics(self, cast: Cast) -> None:
        for topic in ("waits", "split~1of2"):
            cast.on(topic).send(delay_ms=60_000)
        retries = cast.on("retries").declare(retry_delays="60000", ack_timeout="1")
        retries.send()
        retries.take()
        time.sleep(0.01)
        Services(cast).reclaimer.step(["retries"])
        cast.on("empty").declare()
        cast.ask("DEL", cast.store.keys.topics)
        made = registry(cast)
        made.search()
        assert made.topics == ["retries", "split~1of2", "waits"]
        assert cast.store.drive(cast.store.shards()) == made.topics

    def test_a_reload_while_a_topic_is_declared_is_not_lost(
        self, cast: Cast, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = registry(cast, a={"max_ready": 5})
        newer = registry(cast, a={"max_ready": 6}).plan
        call = cast.store.call

        def reload_meanwhile(transition: Any) -> Any:
            result = call(transition)
            if isinstance(transition, Configure) and made.plan is not newer:
                made.reconfigure(newer)
            return result

        monkeypatch.setattr(cast.store, "call", reload_meanwhile)
        for _ in range(2):
            made.step()
        assert cast.on("a").options().max_ready == 6


class TestAwaitedGroups:
    def test_only_a_live_consumer_that_waits_has_its_group_declared(
        self, cast: Cast, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mails, made = cast.on("mails"), registry(cast)
        mails.send()
        assert made.declare_awaited(["mails"]) == [None]
        assert made.awaited(["mails"]) == []
        assert mails.groups() == (), "messages alone declare nothing"
        for topic in ("mails", "posts"):
            record = presence.ConsumerPresence(name="c", topic=topic)
            cast.store.drive(presence.announce_consumer(cast.store, record))
        with monkeypatch.context() as later:
            later.setattr(presence, "GONE_AFTER_MS", 10)
            time.sleep(0.02)
            registry(cast).declare_awaited(["mails"])
        assert mails.groups() == (), "the consumer is gone"
        assert made.awaited(["mails"]) == ["mails"]
        assert made.declare_awaited(["mails"]) == [None]
        assert mails.groups() == ("lisa",)
        assert made.awaited(["mails"]) == []
        registry(cast, posts={"group": "post"}).declare_awaited(["posts"])
        assert cast.on("posts").groups() == ("post",), "the configuration names it"
        cast.on("hooks").declare()  # by somebody else
        made.declare_awaited(["hooks"])
        assert cast.store.known_groups("hooks") == ("g",)


class TestWaker:
    def test_the_gap_ends_when_the_server_has_read_that_we_subscribe(
        self, server: str, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lisa.manager.waker.LISTEN_S", 0.05)

        def subscribers() -> int:
            return int(raw.pubsub_numsub("c")[0][1])

        with HoldingProxy(server, b"SUBSCRIBE") as way:
            connection = Connection(Address(way.url))
            listening: list[int] = []
            waker = Waker(
                connection, "c", lambda *_: None, lambda _: listening.append(subscribers())
            )
            try:
                wait_until(lambda: waker.step() == 0.0 and way.holds)
                assert listening == []
                way.release()
                wait_until(lambda: waker.step() == 0.0 and listening)
                assert listening == [1]
            finally:
                waker.stop()
                connection.close()

    def test_a_silent_connection_is_replaced(
        self, cast: Cast, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, seconds in (("LISTEN_S", 0.01), ("QUIET_S", 0.05), ("SILENT_S", 0.2)):
            monkeypatch.setattr(f"lisa.manager.waker.{name}", seconds)
        connection, gaps = cast.store.connection, list[float]()
        waker = Waker(connection, "c", lambda *_: None, lambda _: gaps.append(time.monotonic()))
        try:
            ends = time.monotonic() + 0.6
            while time.monotonic() < ends:
                assert waker.step() == 0.0
            assert len(gaps) == 1  # it sends a request and gets a reply
            monkeypatch.setattr(ChannelSubscription, "ping", lambda _: None)  # lost in transit
            wait_until(lambda: waker.step() == 0.0 and len(gaps) == 2)
            assert gaps[1] - ends >= 0.1
        finally:
            waker.stop()


class TestNode:
    def test_a_read_only_replica_counts_as_unavailable(self, own_server: EmbeddedServer) -> None:
        store = open_store(own_server.url)
        node = Node(store, ServerClock(), lambda *_: None)
        assert node.step() is not None
        node.mark_reachable()
        with EmbeddedServer() as primary, connect(own_server.url) as client:
            client.replicaof("127.0.0.1", primary.port)
            assert node.step() is None
            assert "read-only replica" in str(node.error)
            client.replicaof("NO", "ONE")
            promoted = node.step()
        assert promoted is not None
        assert promoted.is_change
