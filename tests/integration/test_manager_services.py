"""Promoter, reclaimer, trimmer and announcer, one step at a time.

Numbers such as L4 are known defects of the original's manager; Lisa has none of them.
"""

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import redis

from lisa.admin import topics
from lisa.core.model import signals
from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.model.message import Message
from lisa.core.transitions.delivery import Open
from lisa.manager import reclaimer
from lisa.manager.bulk_reads import PAGE
from lisa.manager.loop import NextDue
from lisa.manager.promoter import CERTAIN_S, FIRST_S, LONGEST_UNREAD_S
from tests.consumers import heard
from tests.roles import Cast, Services
from tests.servers import wait_until

CLOCK_S = 0.1  # the precision of a manager's estimate of the server's clock on a busy machine
DAY_MS = 86_400_000


@pytest.fixture
def server(redis_url: str) -> str:
    """The embedded server alone: tests/contract runs the scripts on each kind of server."""
    return redis_url


@pytest.fixture
def signalled() -> dict[str, list[Message]]:
    """The messages of the module-wide signals, by name."""
    return {
        name: heard(getattr(signals.everywhere, name)) for name in ("retrying", "dead", "expired")
    }


def instant(outcomes: Sequence[NextDue]) -> float:
    (at,) = outcomes
    assert isinstance(at, float)
    return at


def lapsed(cast: Cast, count: int = 1, *, retry_delays: str = "60000") -> list[str]:
    """Messages of a consumer that died; their leases have ended."""
    cast.configure(ack_timeout="10", retry_delays=retry_delays)
    sent = [cast.send() for _ in range(count)]
    cast.take()
    time.sleep(0.02)
    return sent


def is_due_instant(kit: Services, cast: Cast, message_id: str, at: float) -> bool:
    """Whether a waiting message is due at that instant."""
    due_ms = cast.look(message_id).waiting_due_ms or 0
    return at == pytest.approx(kit.clock.instant(due_ms), abs=CLOCK_S)


def calls(raw: redis.Redis, command: str = "") -> int:
    """The number of calls of a command, or of all, so far."""
    stats = raw.info("commandstats")
    return sum(int(stats[name]["calls"]) for name in stats if name.startswith(f"cmdstat_{command}"))


def fill(cast: Cast) -> None:
    """Have 30 messages due for groups that take 10."""
    cast.configure(max_ready="10")
    for _ in range(30):
        cast.send_due()


class TestPromoter:
    def test_moves_what_is_due_and_names_the_next_instant(
        self, cast: Cast, kit: Services, raw: redis.Redis, signalled: dict[str, list[Message]]
    ) -> None:
        due, later = cast.send_due(), cast.send(delay_ms=60_000)
        late = cast.send({"n": 1}, delay_ms=20, ttl_ms=1)
        other = cast.on("other").declare(paused="1")
        resting = other.send_due()
        time.sleep(0.05)
        raw.script_flush()
        assert kit.promoter.step(["orders", "other"])[1] is None
        at = instant(kit.promoter.step(["orders"]))
        assert cast.states([due, later, late]) == ["ready", "waiting", "expired"]
        assert is_due_instant(kit, cast, later, at)
        assert kit.announcer.step() == 1
        (message,) = signalled["expired"]
        assert (message.id, message.body, message.group) == (late, {"n": 1}, "g")
        assert other.state(resting) == "waiting", "its topic is paused"
        other.configure(paused="0")
        kit.promoter.step(["other"])
        assert other.state(resting) == "ready"

    def test_drains_in_consecutive_calls_of_one_batch(self, cast: Cast, kit: Services) -> None:
        for _ in range(250):
            cast.send_due()
        for _ in range(2):
            assert instant(kit.promoter.step(["orders"])) <= time.monotonic()
        assert kit.promoter.step(["orders"]) == [None]
        assert cast.ask("XLEN", cast.own.ready) == 250
        cast.configure(promote_interval="60000")
        cast.send_due()
        cast.send(delay_ms=1_000)
        before = time.monotonic()
        assert instant(kit.promoter.step(["orders"])) >= before + 60, "its topic's interval"

    def test_a_full_group_is_checked_after_growing_pauses(self, cast: Cast, kit: Services) -> None:
        fill(cast)
        for pause_ms in (1, 2, 4, 8, 16, 20, 20):
            before = time.monotonic()
            at = instant(kit.promoter.step(["orders"]))
            assert before + pause_ms / 1e3 <= at <= time.monotonic() + pause_ms / 1e3
        assert len(cast.take(10)) == 10
        at = instant(kit.promoter.step(["orders"]))
        assert at <= time.monotonic() + 2 * FIRST_S, "a quick consumer is not kept waiting"
        kit.promoter.step(["orders"])
        time.sleep(CERTAIN_S)
        for _ in range(12):  # no consumer has read for a second
            before = time.monotonic()
            at = instant(kit.promoter.step(["orders"]))
        assert before + LONGEST_UNREAD_S <= at <= time.monotonic() + LONGEST_UNREAD_S
        cast.configure(max_ready="50")
        wait_until(lambda: kit.promoter.step(["orders"]) == [None])
        assert cast.ask("XLEN", cast.own.ready) == 30

    @pytest.mark.parametrize("broken", ["max_ready", "+inf"])
    def test_one_topics_broken_key_concerns_that_topic_only(
        self, cast: Cast, kit: Services, raw: redis.Redis, broken: str
    ) -> None:
        bad = cast.on("bad").declare()
        if broken == "max_ready":
            fill(bad)
            kit.promoter.step(["bad"])
            raw.hset(bad.keys.options, mapping={"max_ready": "ten", "ack_timeout": "10s"})
        else:
            raw.execute_command("ZADD", bad.keys.waiting, broken, "of another program")
            assert cast.drive(topics.counts(cast.store, ["bad"]))[0].next_due_ms is not None
        due = cast.send_due()
        cast.send(delay_ms=60_000)
        outcome, _ = kit.promoter.step(["bad", "orders"])
        assert isinstance(outcome, LisaError) == (broken == "max_ready")
        assert cast.state(due) == "ready"
        assert "orders" in kit.promoter.poll(["bad", "orders"])
        if broken == "max_ready":
            bad.read()
            cast.take()
            outcome, at = kit.reclaimer.step(["bad", "orders"])
            assert isinstance(outcome, LisaError)
            assert isinstance(at, float)

    def test_a_full_group_does_not_block_others(
        self, cast: Cast, kit: Services, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("LONGEST_S", "LONGEST_UNREAD_S", "CERTAIN_S"):
            monkeypatch.setattr(f"lisa.manager.promoter.{name}", 60.0)
        cast.configure(max_ready="10")
        quick = cast.on("orders", "quick").declare()

        def all_promoted() -> bool:  # the manager's clock may be a moment behind the server's
            return bool(kit.promoter.step(["orders"]) and not cast.ask("ZCARD", cast.keys.waiting))

        for _ in range(2):
            for _ in range(9):
                cast.send_due()
            wait_until(all_promoted)
            assert len(quick.take()) == 9
        assert cast.ask("XLEN", cast.own.ready) == 10
        assert cast.ask("ZCARD", cast.own.retry) == 8
        for _ in range(20):  # until the pauses reach their maximum
            kit.promoter.step(["orders"])
        later = cast.send(delay_ms=20_000)
        assert is_due_instant(kit, cast, later, instant(kit.promoter.step(["orders"])))

    def test_a_full_group_without_consumers_costs_the_others_little(
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        roomy = cast.on("roomy", "quick").declare()
        roomy.on("roomy", "slow").declare()
        quick = cast.on("shared", "quick").declare(max_ready="10")
        quick.on("shared", "slow").declare()
        for _ in range(30):  # more than one call reads; the full group lacks all but ten
            for _ in range(10):
                quick.send_due()
            kit.promoter.step(["shared"])
            quick.take()

        def commands(cast: Cast) -> int:
            """The promoter's commands for a message."""
            cast.send_due()
            delivered, before, looks = raw.xlen(cast.own.ready), calls(raw), 0
            while raw.xlen(cast.own.ready) == delivered:
                kit.promoter.step([cast.topic])
                looks += 1
            spent = calls(raw) - before - looks - 2  # XLEN, and two INFO
            cast.take()
            return spent

        cost = {each.topic: min(commands(each) for _ in range(12)) for each in (roomy, quick)}
        assert cost["shared"] <= 1.5 * cost["roomy"], cost

    def test_a_poll_finds_unannounced_messages(
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        far_ms = 2_000_000_000_000
        other, empty = cast.on("other").declare(), cast.on("empty").declare()
        (retried,) = lapsed(other, retry_delays=str(DAY_MS))
        kit.promoter.step(["orders", "other"])
        kit.reclaimer.step(["other"])
        raw.zadd(cast.keys.waiting, {"by-hand": far_ms})
        due_ms = other.look(retried).group_states[0].due_ms or 0
        assert kit.promoter.poll(["empty", "orders", "other"]) == {
            "orders": pytest.approx(kit.clock.instant(far_ms), abs=CLOCK_S),
            "other": pytest.approx(kit.clock.instant(due_ms), abs=CLOCK_S),
        }
        assert cast.ask("EXISTS", empty.keys.waiting) == 0
        many = [f"t{number:03}" for number in range(PAGE * 2 + 44)]
        for topic in many:
            raw.zadd(kit.store.keys.topic(topic).waiting, {"by-hand": far_ms})
        seen = [list(kit.promoter.poll(many)) for _ in range(3)]
        assert [len(found) for found in seen] == [PAGE] * 3
        assert {topic for found in seen for topic in found} == set(many)


class TestReclaimer:
    def test_takes_back_when_the_lease_ends_and_sleeps_until_then(
        self, cast: Cast, kit: Services, signalled: dict[str, list[Message]]
    ) -> None:
        """L9: a retry counts from the end of the lease, not from the first due time."""
        cast.configure(ack_timeout="700", retry_delays="60000")
        sent = cast.send({"n": 1})
        before = time.monotonic()
        (entry,) = cast.take()
        at = instant(kit.reclaimer.step(["orders"]))
        assert before + 0.699 <= at <= time.monotonic() + 0.701
        assert cast.state(sent) == "in_flight"
        wait_until(lambda: time.monotonic() >= at)
        before_ms = cast.now_ms()
        kit.reclaimer.step(["orders"])
        (state,) = cast.look(sent).group_states
        assert (state.state, state.failed_attempts, state.reason) == ("retry", 1, "ack timeout")
        assert state.due_ms is not None
        assert before_ms + 60_000 <= state.due_ms <= cast.now_ms() + 60_001
        kit.announcer.step()
        (message,) = signalled["retrying"]
        assert (message.id, message.body, message.attempt) == (sent, {"n": 1}, 1)
        assert (message.next_due_ms, message.reason) == (state.due_ms, "ack timeout")
        assert message.due_ms == entry.due_ms
        assert signalled["dead"] == []

        (last,) = lapsed(cast, retry_delays="")
        kit.reclaimer.scan_all()
        kit.reclaimer.step(["orders"])
        assert cast.state(last) == "garbage"
        kit.announcer.step()
        assert [message.id for message in signalled["dead"]] == [last]

    @pytest.mark.parametrize(("topic_ms", "own_ms"), [(10, None), (3_600_000, 10)])
    def test_l10_leases_that_end_together_are_taken_back_in_one_step(
        self, cast: Cast, kit: Services, topic_ms: int, own_ms: int | None
    ) -> None:
        cast.configure(ack_timeout=str(topic_ms), retry_delays="60000")
        for _ in range(35):
            cast.send()
        cast.store.call(Open("orders", "g", cast.read(), own_ms))
        time.sleep(0.02)
        kit.reclaimer.step(["orders"])
        assert cast.ask("ZCARD", cast.own.retry) == 35

    def test_l4_a_pending_entry_of_another_form_stops_nothing(
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        cast.configure(ack_timeout="50", retry_delays="60000")
        raw.xadd(cast.own.ready, {"name": '{"body":"init message...remember lisa"}'})
        behind = cast.send()
        cast.read()
        time.sleep(0.06)
        kit.reclaimer.step(["orders"])
        assert cast.state(behind) == "retry"
        assert cast.ask("XPENDING", cast.own.ready, "g")[0] == 0
        assert cast.ask("XLEN", cast.own.ready) == 0
        assert cast.stats()["cleared@g"] == 1

    def test_leases_of_their_own_cost_a_look_when_they_end(
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        """Deliveries at different times, each with a lease longer than the topic's timeout."""
        cast.configure(ack_timeout="500", retry_delays="60000")
        held = 60
        for _ in range(held):
            cast.send()
        for _ in range(held):
            cast.store.call(Open("orders", "g", cast.read(1), 60_000))
            time.sleep(0.002)
        before, began = calls(raw, "evalsha"), time.monotonic()
        while time.monotonic() - began < 1.2:
            at = [instant(kit.reclaimer.step(["orders"])), *kit.reclaimer.poll(["orders"]).values()]
            time.sleep(min(max(0.0, min(at) - time.monotonic()), 0.1))
        full_checks = (time.monotonic() - began) / 0.5 + 1  # one for each ack timeout
        windows = held / 10 + 1
        assert calls(raw, "evalsha") - before <= windows * full_checks

    def test_after_an_outage_it_waits_one_ack_timeout(self, cast: Cast, kit: Services) -> None:
        cast.configure(ack_timeout="500")
        kit.reclaimer.step(["orders"])
        sent = cast.send()
        cast.take()
        time.sleep(0.55)
        came_back = time.monotonic()
        kit.reclaimer.hold.add(came_back, 0.126)
        kit.reclaimer.hold.add(
            came_back + 0.1, 0.01
        )  # a short one does not end or prolong the wait
        kit.reclaimer.scan_all()  # nor does the cron
        at, state = instant(kit.reclaimer.step(["orders"])), cast.state(sent)
        if time.monotonic() < came_back + 0.5:
            assert at == pytest.approx(came_back + 0.5)
            assert state == "in_flight"
        wait_until(lambda: time.monotonic() >= came_back + 0.5)
        kit.reclaimer.step(["orders"])
        assert cast.state(sent) == "retry"

    def test_after_refused_scripts_it_waits_one_ack_timeout(
        self, cast: Cast, kit: Services
    ) -> None:
        """A slot that moves refuses scripts, though its node answers."""
        cast.configure(ack_timeout="200")
        sent = cast.send()
        cast.take()
        kit.reclaimer.hold.observe("orders", ServerUnavailable("TRYAGAIN"))
        time.sleep(0.25)
        began = time.monotonic()
        kit.reclaimer.step(["orders"])  # finds that scripts run again, and moves nothing
        passed = time.monotonic()
        assert cast.state(sent) == "in_flight"
        assert began + 0.2 <= kit.reclaimer.hold.until("orders") <= passed + 0.2
        time.sleep(0.2)
        kit.reclaimer.step(["orders"])
        assert cast.state(sent) == "retry"

    def test_short_outages_and_refusals_never_put_it_off(
        self, cast: Cast, kit: Services, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise, repeated disconnections would postpone it indefinitely."""
        cast.configure(ack_timeout="200")
        sent = cast.send()
        cast.take()
        time.sleep(0.25)
        now = time.monotonic()
        kit.reclaimer.hold.add(now, 0.049)
        monkeypatch.setattr(reclaimer, "time", SimpleNamespace(monotonic=lambda: now))
        kit.reclaimer.hold.observe("orders", ServerUnavailable("TRYAGAIN"))
        kit.reclaimer.hold.observe("orders", None)
        kit.reclaimer.step(["orders"])
        assert cast.state(sent) == "retry"


class TestTrimmer:
    def test_l6_removes_foreign_entries_and_nothing_else(
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        held = cast.send()
        cast.take()
        foreign = raw.xadd(cast.own.ready, {"msg": "INIT"})
        raw.xreadgroup("g", "other", {cast.own.ready: ">"})
        raw.xack(cast.own.ready, "g", foreign)
        unread = [cast.send() for _ in range(30)]
        cast.configure(max_ready="10")
        for _ in range(2):
            kit.promoter.step(["orders"])
            kit.trimmer.step("orders")
        assert cast.state(held) == "in_flight"
        assert cast.ask("XLEN", cast.own.ready) == 31
        assert {cast.state(one) for one in unread} == {"ready"}
        assert cast.stats()["trimmed@g"] == 1

    def test_l3_messages_whose_entries_a_foreign_hand_took_are_due_again(
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        cast.configure(ack_timeout="50", retry_delays="0")
        sent = [cast.send() for _ in range(5)]
        taken = cast.take(2)
        raw.xdel(cast.own.ready, taken[0].entry)  # pending at the head of the list, and deleted
        time.sleep(0.06)
        kit.reclaimer.step(["orders"])
        assert cast.states(sent)[1] == "retry", "the one behind"
        assert cast.ask("XPENDING", cast.own.ready, "g")[0] == 0
        raw.delete(cast.own.ready)
        kit.trimmer.step("orders")
        kit.promoter.step(["orders"])
        assert sorted(entry.id for entry in cast.take()) == sorted(sent)


def test_the_announcer_calls_receivers_of_all_kinds_and_survives_one_that_raises(
    cast: Cast, kit: Services, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[str, str]] = []

    def plain(topic: str, *, message: Message) -> None:
        seen.append((message.id, threading.current_thread().name))

    async def coroutine(topic: str, *, message: Message) -> None:
        seen.append((message.id, "any"))

    def raises(topic: str, *, message: Message) -> None:
        raise ValueError("boom")

    for receiver in (receivers := (raises, plain, coroutine)):
        signals.everywhere.retrying.connect(receiver, sender="orders")
    kit.announcer.start()
    try:
        (sent,) = lapsed(cast)
        kit.reclaimer.step(["orders"])
        wait_until(lambda: len(seen) == 2)
    finally:
        kit.announcer.stop()
    assert sorted(seen) == [(sent, "any"), (sent, "lisa-announcer")]
    assert "boom" in caplog.text
    assert receivers
