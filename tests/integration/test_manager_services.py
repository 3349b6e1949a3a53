"""Promoter, reclaimer and trimmer, one step at a time, on real servers."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from lisa.core import signals
from lisa.core.errors import LisaError
from lisa.core.message import Message
from lisa.core.transitions.open import Open
from lisa.core.transitions.undeclare import Undeclare
from lisa.manager.promoter import LONGEST_PAUSE_S
from lisa.manager.reclaimer import GLANCE_S
from tests.roles import Cast, Services
from tests.servers import connect, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import redis
    from blinker import Signal

    from lisa.manager.loop import Outcome


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
def kit(cast: Cast) -> Services:
    return Services(cast)


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


def instant(outcomes: Sequence[Outcome]) -> float:
    (at,) = outcomes
    assert isinstance(at, float)
    return at


class TestPromoter:
    def test_moves_what_is_due_and_names_the_next_instant(self, cast: Cast, kit: Services) -> None:
        due, later = cast.send_due(), cast.send(delay_ms=400)
        at = instant(kit.promoter.step(["orders"]))
        assert (cast.state(due), cast.state(later)) == ("ready", "waiting")
        due_ms = cast.look(later).waiting_due_ms
        assert due_ms is not None
        assert at == pytest.approx(kit.clock.instant(due_ms), abs=0.005)
        time.sleep(max(0.0, at - time.monotonic()))
        assert kit.promoter.step(["orders"]) == [None]
        assert cast.state(later) == "ready"

    def test_drains_in_calls_of_one_batch_that_follow_at_once(
        self, cast: Cast, kit: Services
    ) -> None:
        for _ in range(250):
            cast.send_due()
        for _ in range(2):
            at = instant(kit.promoter.step(["orders"]))
            assert at <= time.monotonic()
        assert kit.promoter.step(["orders"]) == [None]
        assert cast.store.ask("XLEN", cast.own.ready) == 250

    def test_a_full_group_is_asked_again_after_pauses_that_grow(
        self, cast: Cast, kit: Services
    ) -> None:
        cast.configure(max_ready="10")
        for _ in range(30):
            cast.send_due()
        pauses = []
        for _ in range(7):
            before = time.monotonic()
            at = instant(kit.promoter.step(["orders"]))
            pauses.append(at - before)
        assert pauses[0] < 0.010
        assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S, abs=0.010)
        for _ in range(2):
            assert len(cast.take(10)) == 10
            kit.promoter.step(["orders"])
        assert len(cast.take(10)) == 10
        assert cast.store.ask("ZCARD", cast.keys.waiting) == 0

    def test_nothing_while_paused(self, cast: Cast, kit: Services) -> None:
        due = cast.send_due()
        cast.configure(paused="1")
        assert kit.promoter.step(["orders"]) == [None]
        assert cast.state(due) == "waiting"
        cast.configure(paused="0")
        kit.promoter.step(["orders"])
        assert cast.state(due) == "ready"

    def test_ends_at_once_what_is_past_its_ttl(
        self, cast: Cast, kit: Services, heard: dict[str, list[Message]]
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
        self, cast: Cast, kit: Services, raw: redis.Redis
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
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        other = cast.on("other").declare()
        ids = [cast.send_due(), other.send_due()]
        raw.script_flush()
        assert kit.promoter.step(["orders", "other"]) == [None, None]
        assert [cast.state(ids[0]), other.state(ids[1])] == ["ready", "ready"]


class TestReclaimer:
    def test_takes_back_when_the_lease_ends_and_sleeps_until_then(
        self, cast: Cast, kit: Services, heard: dict[str, list[Message]]
    ) -> None:
        cast.configure(ack_timeout="300", retry_delays="60000")
        sent = cast.send({"n": 1})
        cast.take()
        began = time.monotonic()
        at = instant(kit.reclaimer.step(["orders"]))
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
        self, cast: Cast, kit: Services, heard: dict[str, list[Message]]
    ) -> None:
        cast.configure(ack_timeout="10", retry_delays="")
        sent = cast.send()
        cast.take()
        time.sleep(0.02)
        kit.reclaimer.step(["orders"])
        assert cast.state(sent) == "garbage"
        kit.announcer.step()
        assert [message.id for message in heard["dead"]] == [sent]

    def test_goes_to_the_end_of_the_list_in_one_step(self, cast: Cast, kit: Services) -> None:
        cast.configure(ack_timeout="10", retry_delays="60000")
        for _ in range(35):
            cast.send()
        cast.take()
        time.sleep(0.02)
        kit.reclaimer.step(["orders"])
        assert cast.store.ask("ZCARD", cast.own.retry) == 35

    def test_a_lease_of_its_own_that_is_shorter_is_seen_in_time(
        self, cast: Cast, kit: Services
    ) -> None:
        cast.configure(ack_timeout="3600000")
        cast.send()
        cast.take()
        kit.reclaimer.step(["orders"])  # the full look: nothing ends within the hour
        sent = cast.send()
        cast.store.call(Open("orders", "g", cast.read(), 50))
        at = instant(kit.reclaimer.step(["orders"]))
        assert at <= time.monotonic() + 0.06
        time.sleep(0.06)
        at = instant(kit.reclaimer.step(["orders"]))
        assert cast.state(sent) == "retry"
        assert at <= time.monotonic() + GLANCE_S

    def test_after_an_outage_it_waits_one_ack_timeout(self, cast: Cast, kit: Services) -> None:
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

    def test_short_outages_never_put_it_off(self, cast: Cast, kit: Services) -> None:
        """A connection cut again and again would otherwise postpone it for ever."""
        cast.configure(ack_timeout="200")
        sent = cast.send()
        cast.take()
        time.sleep(0.25)
        kit.reclaimer.hold(time.monotonic(), 0.049)
        kit.reclaimer.step(["orders"])
        assert cast.state(sent) == "retry"

    def test_a_short_outage_does_not_end_the_wait_after_a_long_one(
        self, cast: Cast, kit: Services
    ) -> None:
        cast.configure(ack_timeout="200")
        long_ended = time.monotonic()
        kit.reclaimer.hold(long_ended, 0.051)
        kit.reclaimer.hold(time.monotonic() + 0.1, 0.01)
        assert kit.reclaimer.step(["orders"]) == [pytest.approx(long_ended + 0.2)]

    def test_a_group_that_was_removed_is_no_trouble(self, cast: Cast, kit: Services) -> None:
        kit.reclaimer.step(["orders"])
        Cast(cast.store.connection.address.url).store.call(Undeclare("orders", "g", [], True))
        at = instant(kit.reclaimer.step(["orders"]))
        assert at <= time.monotonic() + GLANCE_S
        assert cast.store.known_groups("orders") == ()

    def test_one_topics_broken_key_concerns_that_topic_only(
        self, cast: Cast, kit: Services, raw: redis.Redis
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
        self, cast: Cast, kit: Services, raw: redis.Redis
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
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        sent = [cast.send() for _ in range(5)]
        raw.xtrim(cast.own.ready, maxlen=2, approximate=False)
        kit.trimmer.step("orders")
        assert [cast.state(one) for one in sent] == ["retry"] * 3 + ["ready"] * 2
        kit.promoter.step(["orders"])
        assert sorted(entry.id for entry in cast.take()) == sorted(sent)

    def test_a_stream_that_was_deleted_is_declared_again(
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        sent = cast.send()
        raw.delete(cast.own.ready)
        kit.trimmer.step("orders")
        kit.promoter.step(["orders"])
        assert [entry.id for entry in cast.take()] == [sent]


class TestAnnouncer:
    def test_receivers_of_all_kinds_and_one_that_raises(
        self, cast: Cast, kit: Services, caplog: pytest.LogCaptureFixture
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
