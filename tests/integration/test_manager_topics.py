"""A manager's state of topics and of its server: each part, one step at a time."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import redis

from lisa.core.redis.address import Address
from lisa.core.redis.connection import ChannelSubscription, Connection
from lisa.core.store import presence
from lisa.core.transitions.configure import Configure
from lisa.embedded import EmbeddedServer
from lisa.manager.group_declarer import GroupDeclarer
from lisa.manager.plan import Plan, Schedules
from lisa.manager.reclaimer import Reclaimer
from lisa.manager.registry import Registry
from lisa.manager.server_clock import ServerClock
from lisa.manager.server_monitor import ServerMonitor
from lisa.manager.signal_queue import SignalQueue
from lisa.manager.waker import Waker
from tests.proxies import HoldingProxy
from tests.roles import Cast
from tests.servers import connect, open_store, wait_until


@pytest.fixture
def server(redis_url: str) -> str:
    return redis_url


def registry(cast: Cast, **topics: dict[str, object]) -> Registry:
    plan = Plan.of(topics, {}, default_group="lisa", schedules=Schedules())
    return Registry(cast.store, plan, lambda _: None)


class TestRegistry:
    def test_declares_options_and_groups_and_keeps_what_an_operator_set(self, cast: Cast) -> None:
        registry(cast, a={"ack_timeout": "1s", "max_ready": 5, "group": "x"}).step()
        cast.store.call(Configure("a", {"max_ready": "7"}))
        registry(cast, a={"ack_timeout": "2s", "max_ready": 6}).step()
        options = cast.store.drive(cast.store.options("a"))
        assert (options.ack_timeout, options.max_ready) == (timedelta(seconds=2), 7)
        assert cast.store.drive(cast.store.groups("a")) == ("x",)
        registry(cast, a={}).step()  # no longer declared
        assert cast.store.drive(cast.store.options("a")).ack_timeout == timedelta(seconds=10)

    @pytest.mark.parametrize("broken", [("SET", "not a hash"), ("HSET", "schedules", "not JSON")])
    def test_a_broken_topic_does_not_stop_others_and_is_retried(
        self, cast: Cast, raw: redis.Redis, broken: tuple[str, ...]
    ) -> None:
        options = cast.store.keys.topic("a").options
        raw.execute_command(broken[0], options, *broken[1:])
        made = registry(cast, a={"max_ready": 5}, b={"max_ready": 5})
        made.step()
        assert made.topics == ["a", "b"]
        assert made.topic_errors.of("a") is not None
        assert cast.store.drive(cast.store.options("b")).max_ready == 5
        raw.delete(options)
        made.step()
        assert made.topic_errors.of("a") is None
        assert cast.store.drive(cast.store.options("a")).max_ready == 5

    def test_a_search_finds_unlisted_topics(self, cast: Cast, raw: redis.Redis) -> None:
        cast.on("waits").send(delay_ms=60_000)
        retries = cast.on("retries").declare(retry_delays="60000", ack_timeout="1")
        retries.send()
        retries.take()
        time.sleep(0.01)
        Reclaimer(cast.store, ServerClock(), SignalQueue(cast.store), 10).step(["retries"])
        cast.on("empty").declare()
        raw.delete(cast.store.keys.topics)
        made = registry(cast)
        made.search()
        assert made.topics == ["retries", "waits"]
        assert cast.store.drive(cast.store.topics()) == ["retries", "waits"]

    def test_a_reload_while_a_topic_is_declared_is_not_lost(
        self, cast: Cast, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = registry(cast, a={"max_ready": 5})
        newer = replace(made.plan, topics=registry(cast, a={"max_ready": 6}).plan.topics)
        call = cast.store.call

        def reload_meanwhile(transition: Any) -> Any:
            result = call(transition)
            if isinstance(transition, Configure) and made.plan is not newer:
                made.reconfigure(newer)
            return result

        monkeypatch.setattr(cast.store, "call", reload_meanwhile)
        made.step()
        made.step()
        assert cast.store.drive(cast.store.options("a")).max_ready == 6


class TestGroupDeclarer:
    def test_messages_alone_declare_nothing_a_waiting_consumer_does(self, cast: Cast) -> None:
        other = cast.on("mails")
        other.send()
        declarer = GroupDeclarer(cast.store, registry(cast))
        assert declarer.step(["mails"]) == [None]
        assert declarer.poll(["mails"]) == []
        assert cast.store.drive(cast.store.groups("mails")) == ()
        self.wait_for_group(cast, "mails")
        assert declarer.poll(["mails"]) == ["mails"]
        assert declarer.step(["mails"]) == [None]
        assert cast.store.drive(cast.store.groups("mails")) == ("lisa",)
        assert declarer.poll(["mails"]) == []

        cast.on("hooks").declare()  # by somebody else
        declarer.step(["hooks"])
        assert cast.store.known_groups("hooks") == ("g",)

    def test_it_declares_the_group_that_the_configuration_names(
        self, cast: Cast, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.wait_for_group(cast, "mails")
        with monkeypatch.context() as later:
            later.setattr(presence, "GONE_AFTER_MS", 10)
            time.sleep(0.02)
            GroupDeclarer(cast.store, registry(cast)).step(["mails"])
        assert cast.store.drive(cast.store.groups("mails")) == (), "the consumer is gone"
        GroupDeclarer(cast.store, registry(cast, mails={"group": "post"})).step(["mails"])
        assert cast.store.drive(cast.store.groups("mails")) == ("post",)

    @staticmethod
    def wait_for_group(cast: Cast, topic: str) -> None:
        record = presence.ConsumerPresence(name="c", topic=topic)
        cast.store.drive(presence.announce_consumer(cast.store, record))


class TestWaker:
    def test_the_gap_ends_when_the_server_has_read_that_we_subscribe(
        self, server: str, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lisa.manager.waker.LISTEN_S", 0.05)
        with HoldingProxy(server, b"SUBSCRIBE") as way:
            connection = Connection(Address(way.url))
            listening: list[int] = []
            waker = Waker(
                connection,
                "c",
                lambda _: None,
                lambda: listening.append(raw.pubsub_numsub("c")[0][1]),
            )
            try:
                waker.step()
                assert way.holds
                assert listening == []
                way.release()
                wait_until(lambda: waker.step() == 0.0 and listening)
                assert listening == [1]
            finally:
                waker.stop()
                connection.close()

    def test_a_silent_connection_is_replaced(
        self, cast: Cast, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, seconds in (("LISTEN_S", 0.01), ("QUIET_S", 0.05), ("SILENT_S", 0.2)):
            monkeypatch.setattr(f"lisa.manager.waker.{name}", seconds)
        gaps: list[float] = []
        waker = Waker(
            cast.store.connection,
            cast.store.keys.wake,
            lambda _: None,
            lambda: gaps.append(time.monotonic()),
        )
        try:
            ends = time.monotonic() + 0.6
            while time.monotonic() < ends:
                assert waker.step() == 0.0
            assert len(gaps) == 1  # it sends a request and gets a reply
            with monkeypatch.context() as cut:
                cut.setattr(ChannelSubscription, "ping", lambda _: None)  # lost in transit
                wait_until(lambda: waker.step() == 0.0 and len(gaps) == 2)
            assert gaps[1] - ends >= 0.1
        finally:
            waker.stop()


class TestServerMonitor:
    def test_a_read_only_replica_counts_as_unavailable(self, own_server: EmbeddedServer) -> None:
        store = open_store(own_server.url)
        monitor = ServerMonitor(store, ServerClock())
        assert monitor.step() is not None
        monitor.mark_reachable()
        with EmbeddedServer() as primary, connect(own_server.url) as client:
            client.replicaof("127.0.0.1", primary.port)
            assert monitor.step() is None
            assert "read-only replica" in (monitor.error or "")
            client.replicaof("NO", "ONE")
            promoted = monitor.step()
        assert promoted is not None
        assert promoted.back
        store.close()
