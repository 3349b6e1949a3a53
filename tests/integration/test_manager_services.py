"""Promoter, reclaimer and trimmer, one step at a time, on real servers."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from lisa.admin import topics
from lisa.core.model import signals
from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.model.message import Message
from lisa.core.transitions.cancel import Cancel
from lisa.core.transitions.open import Open
from lisa.core.transitions.undeclare import Undeclare
from lisa.manager import lease_hold
from lisa.manager.backpressure import CERTAIN_S, FIRST_S, LONGEST_UNREAD_S
from lisa.manager.bulk_reads import PAGE
from lisa.manager.promoter import SECOND_S
from lisa.manager.reclaimer import CLOSEST_S
from tests.consumers import heard
from tests.roles import Cast, Services
from tests.servers import failing_disk, least, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    import redis

    from lisa.embedded import EmbeddedServer
    from lisa.manager.loop import Outcome

SLOW_S = 0.1  # half of the quickest round trip: the precision of the clock


@pytest.fixture
def signalled() -> dict[str, list[Message]]:
    """The messages of the module-wide signals, by name."""
    return {
        name: heard(getattr(signals.everywhere, name)) for name in ("retrying", "dead", "expired")
    }


def instant(outcomes: Sequence[Outcome]) -> float:
    (at,) = outcomes
    assert isinstance(at, float)
    return at


def calls(raw: redis.Redis, command: str) -> int:
    """The number of calls of a command so far."""
    told = raw.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})
    return int(told["calls"])


class TestPromoter:
    def test_moves_what_is_due_and_names_the_next_instant(self, cast: Cast, kit: Services) -> None:
        due, later = cast.send_due(), cast.send(delay_ms=400)
        at = instant(kit.promoter.step(["orders"]))
        assert (cast.state(due), cast.state(later)) == ("ready", "waiting")
        due_ms = cast.look(later).waiting_due_ms
        assert due_ms is not None
        assert at == pytest.approx(kit.clock.instant(due_ms), abs=0.005)
        outcome: Outcome = at
        while outcome is not None:  # after slow replies, a call may be slightly early
            at = instant([outcome])
            time.sleep(max(0.0, at - time.monotonic()))
            [outcome] = kit.promoter.step(["orders"])
        assert kit.clock.instant(due_ms) - SLOW_S <= at <= time.monotonic()
        assert cast.state(later) == "ready"

    def test_drains_in_consecutive_calls_of_one_batch(self, cast: Cast, kit: Services) -> None:
        for _ in range(250):
            cast.send_due()
        for _ in range(2):
            at = instant(kit.promoter.step(["orders"]))
            assert at <= time.monotonic()
        assert kit.promoter.step(["orders"]) == [None]
        assert cast.store.ask("XLEN", cast.own.ready) == 250

    def test_a_full_group_is_checked_after_growing_pauses(self, cast: Cast, kit: Services) -> None:
        cast.configure(max_ready="10")
        for _ in range(30):
            cast.send_due()
        for pause_ms in (1, 2, 4, 8, 16, 20, 20):
            before = time.monotonic()
            at = instant(kit.promoter.step(["orders"]))
            assert before + pause_ms / 1e3 <= at <= time.monotonic() + pause_ms / 1e3
        time.sleep(CERTAIN_S)
        for _ in range(8):  # no consumer has read for a second
            before = time.monotonic()
            at = instant(kit.promoter.step(["orders"]))
        assert before + LONGEST_UNREAD_S <= at <= time.monotonic() + LONGEST_UNREAD_S
        for _ in range(2):
            assert len(cast.take(10)) == 10
            kit.promoter.step(["orders"])
        assert len(cast.take(10)) == 10
        assert cast.store.ask("ZCARD", cast.keys.waiting) == 0

    def test_while_it_is_full_plain_reads_ask_and_promote_rarely(
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        cast.configure(max_ready="10")
        for _ in range(30):
            cast.send_due()
        kit.promoter.step(["orders"])

        def scripts(steps: int) -> int:
            before = calls(raw, "evalsha")
            for _ in range(steps):
                at = instant(kit.promoter.step(["orders"]))
                time.sleep(max(0.0, at - time.monotonic()))
            return calls(raw, "evalsha") - before

        assert least(lambda: scripts(6), 1) == 0
        time.sleep(CERTAIN_S)
        assert scripts(1) == 1

    def test_a_full_topic_with_more_room_allowed_moves_on(self, cast: Cast, kit: Services) -> None:
        cast.configure(max_ready="10")
        for _ in range(30):
            cast.send_due()
        kit.promoter.step(["orders"])
        cast.configure(max_ready="50")
        assert kit.promoter.step(["orders"]) == [None]
        assert cast.store.ask("XLEN", cast.own.ready) == 30

    def test_a_quick_consumer_of_a_full_group_is_not_kept_waiting(
        self, cast: Cast, kit: Services
    ) -> None:
        cast.configure(max_ready="100")
        for _ in range(300):
            cast.send_due()
        for _ in range(8):  # until the pauses reach their maximum
            kit.promoter.step(["orders"])
        assert len(cast.take(100)) == 100
        assert instant(kit.promoter.step(["orders"])) <= time.monotonic()
        at = instant(kit.promoter.step(["orders"]))
        assert at <= time.monotonic() + 2 * FIRST_S

    def test_one_full_topics_unreadable_max_ready_concerns_that_topic_only(
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        cast.configure(max_ready="10")
        for _ in range(30):
            cast.send_due()
        kit.promoter.step(["orders"])
        raw.hset(cast.keys.options, "max_ready", "ten")
        fine = cast.on("fine").declare()
        sent = fine.send_due()
        broken, _ = kit.promoter.step(["orders", "fine"])
        assert isinstance(broken, LisaError)
        assert fine.state(sent) == "ready"

    @pytest.mark.parametrize("score", ["+inf", "-inf"])
    def test_an_infinite_due_time_concerns_that_topic_only(
        self, cast: Cast, kit: Services, raw: redis.Redis, score: str
    ) -> None:
        raw.execute_command("ZADD", cast.keys.waiting, score, "of another program")
        fine = cast.on("fine").declare()
        fine.send(delay_ms=60_000)
        assert cast.store.drive(topics.counts(cast.store, ["orders"]))[0].next_due_ms is not None
        outcomes = kit.promoter.step(["orders", "fine"])
        assert not [one for one in outcomes if isinstance(one, Exception)]
        assert "fine" in kit.promoter.poll(["orders", "fine"])

    def test_a_full_group_does_not_block_others(self, cast: Cast, kit: Services) -> None:
        cast.configure(max_ready="10")
        slow, quick = cast, cast.on("orders", "quick").declare()
        for _ in range(15):
            cast.send_due()

        def promote_all() -> None:  # the manager's clock may be a moment behind the server's
            wait_until(
                lambda: (
                    kit.promoter.step(["orders"]) and not cast.store.ask("ZCARD", cast.keys.waiting)
                )
            )

        for _ in range(3):
            promote_all()
            quick.take()
            cast.send_due()
        promote_all()
        assert len(quick.take()) == 1
        assert slow.store.ask("XLEN", slow.own.ready) == 10
        assert slow.store.ask("ZCARD", slow.own.retry) == 8
        slow.take()
        kit.promoter.step(["orders"])
        assert len(slow.take()) == 8

    def test_a_full_group_without_consumers_costs_the_others_little(
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        alone = cast.on("alone", "quick").declare(max_ready="10")
        quick = cast.on("shared", "quick").declare(max_ready="10")
        quick.on("shared", "slow").declare()
        for _ in range(300):  # more than one call reads; the full group lacks all but ten
            quick.send_due()
            kit.promoter.step(["shared"])
            quick.take()
        cost = {each.topic: self.commands_per_message(each, kit, raw) for each in (alone, quick)}
        # The usual case of promote, which needs fewer commands, is for a single group.
        assert cost["shared"] <= 1.5 * cost["alone"], cost

    @staticmethod
    def commands_per_message(quick: Cast, kit: Services, raw: redis.Redis) -> float:
        """The promoter's commands for each of 30 messages, 20 ms apart."""

        def total() -> int:
            stats = raw.info("commandstats")
            return sum(int(told["calls"]) for told in stats.values())

        spent, most = 0, 30
        for _ in range(most):
            quick.send(delay_ms=20)
            delivered = raw.xlen(quick.own.ready)
            before = total()
            while raw.xlen(quick.own.ready) == delivered:
                (at,) = kit.promoter.step([quick.topic])
                spent -= 1  # XLEN
                if isinstance(at, float):
                    time.sleep(max(0.0, at - time.monotonic()))
            spent += total() - before - 3  # two INFO, and one XLEN more
            quick.take()
        return spent / most

    def test_a_full_group_does_not_delay_another_group(
        self, cast: Cast, kit: Services, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("LONGEST_S", "LONGEST_UNREAD_S", "CERTAIN_S"):
            monkeypatch.setattr(f"lisa.manager.backpressure.{name}", 60.0)
        cast.configure(max_ready="10")
        quick = cast.on("orders", "quick").declare()
        for _ in range(15):
            cast.send_due()
        kit.promoter.step(["orders"])
        quick.take()
        for _ in range(20):  # until the pauses reach their maximum
            kit.promoter.step(["orders"])
        later = cast.send(delay_ms=2_000)
        at = instant(kit.promoter.step(["orders"]))
        due_ms = cast.look(later).waiting_due_ms
        assert due_ms is not None
        assert at == pytest.approx(kit.clock.instant(due_ms), abs=0.005)

    def test_a_poll_finds_unannounced_messages(
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        other = cast.on("other").declare(ack_timeout="10", retry_delays="60000")
        retried = other.send()
        other.take()
        time.sleep(0.02)
        kit.promoter.step(["orders", "other"])
        kit.reclaimer.step(["other"])
        raw.zadd(cast.keys.waiting, {"by-hand": 2_000_000_000_000})
        empty = cast.on("empty").declare()
        assert kit.promoter.poll(["empty", "orders", "other"]) == {
            "orders": pytest.approx(kit.clock.instant(2_000_000_000_000), abs=0.002),
            "other": pytest.approx(
                kit.clock.instant(other.look(retried).group_states[0].due_ms or 0), abs=0.002
            ),
        }
        assert empty.store.ask("EXISTS", empty.keys.waiting) == 0

    def test_all_of_many_topics_are_polled_in_turn(self, kit: Services, raw: redis.Redis) -> None:
        topics = [f"t{number:03}" for number in range(PAGE * 2 + 44)]
        for topic in topics:
            raw.zadd(kit.store.keys.topic(topic).waiting, {"by-hand": 2_000_000_000_000})
        seen = [list(kit.promoter.poll(topics)) for _ in range(3)]
        assert [len(one) for one in seen] == [PAGE] * 3
        assert {topic for one in seen for topic in one} == set(topics)

    def test_the_slower_of_two_managers_lets_the_other_go_first(
        self, cast: Cast, kit: Services
    ) -> None:
        second = Services(cast)
        cast.send(delay_ms=600_000)
        for one in (kit, second):
            one.promoter.step(["orders"])
        assert second.promoter.lag_s("orders") == 0.0

        cast.send_due()
        alone = instant(kit.promoter.step(["orders"]))
        after = instant(second.promoter.step(["orders"]))
        assert after - alone == pytest.approx(SECOND_S, abs=0.004)
        assert [one.promoter.lag_s("orders") for one in (kit, second)] == [0.0, SECOND_S]
        assert second.promoter.poll(["orders"])["orders"] - alone == pytest.approx(
            SECOND_S, abs=0.004
        )

        cast.send_due()  # the first manager has died: the other one takes its place
        second.promoter.step(["orders"])
        kit.promoter.step(["orders"])
        assert [one.promoter.lag_s("orders") for one in (kit, second)] == [SECOND_S, 0.0]

    def test_a_cancelled_message_does_not_make_the_only_manager_wait(
        self, cast: Cast, kit: Services
    ) -> None:
        cast.send(delay_ms=600_000)
        for _ in range(3):
            cast.store.call(Cancel("orders", [cast.send_due()]))
            kit.promoter.step(["orders"])
            assert kit.promoter.lag_s("orders") == 0.0

    def test_nothing_while_paused(self, cast: Cast, kit: Services) -> None:
        due = cast.send_due()
        cast.configure(paused="1")
        assert kit.promoter.step(["orders"]) == [None]
        assert cast.state(due) == "waiting"
        cast.configure(paused="0")
        kit.promoter.step(["orders"])
        assert cast.state(due) == "ready"

    def test_expired_messages_end_at_once(
        self, cast: Cast, kit: Services, signalled: dict[str, list[Message]]
    ) -> None:
        late = cast.send({"n": 1}, delay_ms=20, ttl_ms=1)
        fine = cast.send(delay_ms=20)
        time.sleep(0.05)
        kit.promoter.step(["orders"])
        assert (cast.state(late), cast.state(fine)) == ("expired", "ready")
        assert kit.announcer.step() == 1
        (message,) = signalled["expired"]
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

    def test_a_flushed_script_cache_is_harmless(
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        other = cast.on("other").declare()
        ids = [cast.send_due(), other.send_due()]
        raw.script_flush()
        assert kit.promoter.step(["orders", "other"]) == [None, None]
        assert [cast.state(ids[0]), other.state(ids[1])] == ["ready", "ready"]


class TestReclaimer:
    def test_takes_back_when_the_lease_ends_and_sleeps_until_then(
        self, cast: Cast, kit: Services, signalled: dict[str, list[Message]]
    ) -> None:
        cast.configure(ack_timeout="700", retry_delays="60000")
        sent = cast.send({"n": 1})
        before = time.monotonic()
        (entry,) = cast.take()
        at = instant(kit.reclaimer.step(["orders"]))
        assert before + 0.699 <= at <= time.monotonic() + 0.701
        assert cast.state(sent) == "in_flight"
        time.sleep(max(0.0, at - time.monotonic()))
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

    def test_the_last_attempt_ends_in_garbage(
        self, cast: Cast, kit: Services, signalled: dict[str, list[Message]]
    ) -> None:
        cast.configure(ack_timeout="10", retry_delays="")
        sent = cast.send()
        (entry,) = cast.take()
        time.sleep(0.02)
        kit.reclaimer.step(["orders"])
        assert cast.state(sent) == "garbage"
        kit.announcer.step()
        assert [(one.id, one.due_ms) for one in signalled["dead"]] == [(sent, entry.due_ms)]

    @pytest.mark.parametrize(("topic_ms", "own_ms"), [(10, None), (3_600_000, 10)])
    def test_leases_that_end_together_are_taken_back_in_one_step(
        self, cast: Cast, kit: Services, topic_ms: int, own_ms: int | None
    ) -> None:
        cast.configure(ack_timeout=str(topic_ms), retry_delays="60000")
        for _ in range(35):
            cast.send()
        cast.store.call(Open("orders", "g", cast.read(), own_ms))
        time.sleep(0.02)
        kit.reclaimer.step(["orders"])
        assert cast.store.ask("ZCARD", cast.own.retry) == 35

    def test_a_lease_of_its_own_that_is_shorter_is_seen_in_time(
        self, cast: Cast, kit: Services
    ) -> None:
        cast.configure(ack_timeout="3600000")
        cast.send()
        cast.take()
        kit.reclaimer.step(["orders"])  # the full check: nothing ends within the hour
        sent = cast.send()
        cast.store.call(Open("orders", "g", cast.read(), 1_500))
        _, ends_ms = cast.store.ask("ZRANGE", cast.own.leases, 0, 0, "WITHSCORES")
        at = kit.reclaimer.poll(["orders"])["orders"]
        assert at == kit.clock.instant(int(ends_ms) + 1)
        again = instant(kit.reclaimer.step(["orders"]))
        assert again == at or cast.state(sent) == "retry"  # the lease may have ended meanwhile
        time.sleep(max(0.0, at - time.monotonic()))
        # The estimate of the server's clock may be early by the time of a round trip.
        wait_until(lambda: kit.reclaimer.step(["orders"]) and cast.state(sent) == "retry")

    def test_a_long_lease_of_its_own_hides_no_delivery_made_later(
        self, cast: Cast, kit: Services
    ) -> None:
        cast.configure(ack_timeout="200", retry_delays="60000")
        cast.send()
        cast.store.call(Open("orders", "g", cast.read(), 3_600_000))
        time.sleep(0.21)  # by the topic's timeout it would be overdue
        kit.reclaimer.step(["orders"])
        sent = cast.send()
        cast.take()
        at = instant(kit.reclaimer.step(["orders"]))
        assert at <= time.monotonic() + CLOSEST_S
        time.sleep(max(0.0, at - time.monotonic()))
        kit.reclaimer.step(["orders"])
        assert cast.state(sent) == "retry"

    def test_one_topics_unreadable_ack_timeout_concerns_that_topic_only(
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        fine = cast.on("fine").declare(ack_timeout="100", retry_delays="60000")
        sent = fine.send()
        fine.take()
        raw.hset(cast.keys.options, "ack_timeout", "10s")
        instant(kit.reclaimer.step(["orders"]))  # nothing in flight: nothing to report
        kit.reclaimer.scan_all()
        cast.send()
        cast.read()
        time.sleep(0.11)
        broken, at = kit.reclaimer.step(["orders", "fine"])
        assert isinstance(broken, LisaError)
        assert isinstance(at, float)
        assert fine.state(sent) == "retry"

    def test_a_poll_reports_lease_ends_and_new_groups(self, cast: Cast, kit: Services) -> None:
        cast.store.drive(cast.store.groups("orders"))
        assert kit.reclaimer.poll(["orders"])["orders"] <= time.monotonic()  # never checked
        kit.reclaimer.step(["orders"])
        assert kit.reclaimer.poll(["orders"]) == {}
        cast.send()
        before = time.monotonic()
        cast.store.call(Open("orders", "g", cast.read(), 60_000))
        at = kit.reclaimer.poll(["orders"])["orders"]
        assert before + 59.99 <= at <= time.monotonic() + 60.01
        cast.on("orders", "new").declare()
        cast.store.drive(cast.store.groups("orders"))
        assert kit.reclaimer.poll(["orders"])["orders"] <= time.monotonic()

    def test_leases_of_their_own_cost_a_look_when_they_end(
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        """Deliveries at different times, each with a lease longer than the topic's timeout."""
        cast.configure(ack_timeout="1000", retry_delays="60000")
        held = 60
        for _ in range(held):
            cast.send()
        for _ in range(held):
            cast.store.call(Open("orders", "g", cast.read(1), 30_000))
            time.sleep(0.005)
        before, began = calls(raw, "evalsha"), time.monotonic()
        while time.monotonic() - began < 2.5:
            at = min(
                instant(kit.reclaimer.step(["orders"])), kit.reclaimer.poll(["orders"])["orders"]
            )
            time.sleep(min(max(0.0, at - time.monotonic()), 0.1))
        took = time.monotonic() - began
        windows = held / 10 + 1
        assert calls(raw, "evalsha") - before <= windows * (
            took / 1.0 + 1
        )  # one full check a second

    def test_checks_of_one_group_have_a_minimum_interval(self, cast: Cast, kit: Services) -> None:
        cast.configure(ack_timeout="100", retry_delays="60000")
        sent = cast.send(), cast.send()
        cast.open(cast.read(1))
        cast.store.call(Open("orders", "g", cast.read(1), 10))
        time.sleep(0.02)
        looked = time.monotonic()
        at = instant(kit.reclaimer.step(["orders"]))
        assert looked + CLOSEST_S <= at <= time.monotonic() + CLOSEST_S
        assert cast.states(sent) == ["in_flight", "retry"]
        cast.send()
        cast.store.call(Open("orders", "g", cast.read(), 10))
        assert kit.reclaimer.poll(["orders"])["orders"] >= looked + CLOSEST_S
        time.sleep(max(0.0, at - time.monotonic()))
        kit.reclaimer.step(["orders"])
        assert cast.state(sent[0]) == "retry"

    def test_with_nothing_in_flight_no_script_runs_for_an_ack_timeout(
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        cast.configure(ack_timeout="5000")
        cast.send()
        cast.store.drive(cast.store.groups("orders"))
        before = calls(raw, "evalsha")
        began = time.monotonic()
        at = instant(kit.reclaimer.step(["orders"]))
        assert began + 5 <= at <= time.monotonic() + 5
        assert instant(kit.reclaimer.step(["orders"])) == at  # woken without need
        assert calls(raw, "evalsha") == before

    def test_after_an_outage_it_waits_one_ack_timeout(self, cast: Cast, kit: Services) -> None:
        cast.configure(ack_timeout="200")
        kit.reclaimer.step(["orders"])
        sent = cast.send()
        cast.take()
        time.sleep(0.25)
        came_back = time.monotonic()
        kit.reclaimer.hold(came_back)
        assert kit.reclaimer.step(["orders"]) == [pytest.approx(came_back + 0.2)]
        assert kit.reclaimer.step(["orders"]) == [pytest.approx(came_back + 0.2)]
        kit.reclaimer.scan_all()  # the cron does not shorten it
        kit.reclaimer.step(["orders"])
        assert cast.state(sent) == "in_flight"
        time.sleep(0.2)
        kit.reclaimer.step(["orders"])
        assert cast.state(sent) == "retry"

    def test_short_outages_never_put_it_off(self, cast: Cast, kit: Services) -> None:
        """Otherwise, repeated disconnections would postpone it indefinitely."""
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

    def test_after_refused_scripts_it_waits_one_ack_timeout(
        self, cast: Cast, kit: Services
    ) -> None:
        """A slot that moves refuses scripts, though its node answers."""
        cast.configure(ack_timeout="200")
        sent = cast.send()
        cast.take()
        kit.reclaimer.observe("orders", ServerUnavailable("TRYAGAIN"))
        time.sleep(0.25)
        began = time.monotonic()
        kit.reclaimer.step(["orders"])  # finds that scripts run again, and moves nothing
        passed = time.monotonic()
        assert cast.state(sent) == "in_flight"
        assert began + 0.2 <= kit.reclaimer._hold.until("orders") <= passed + 0.2
        time.sleep(0.2)
        kit.reclaimer.step(["orders"])
        assert cast.state(sent) == "retry"

    def test_after_a_server_could_not_save_its_data_it_waits_one_ack_timeout(
        self, own_server: EmbeddedServer
    ) -> None:
        cast = Cast(own_server.url).declare(ack_timeout="200")
        kit = Services(cast)
        sent = cast.send()
        cast.take()
        time.sleep(0.25)
        with failing_disk(own_server):
            assert isinstance(kit.reclaimer.step(["orders"])[0], ServerUnavailable)
            time.sleep(0.1)
        kit.reclaimer.scan_all()
        kit.reclaimer.step(["orders"])
        assert cast.state(sent) == "in_flight"
        cast.store.close()

    def test_scripts_that_were_refused_for_a_moment_do_not_put_it_off(
        self, cast: Cast, kit: Services, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cast.configure(ack_timeout="200")
        sent = cast.send()
        cast.take()
        time.sleep(0.25)
        now = time.monotonic()
        monkeypatch.setattr(lease_hold, "time", SimpleNamespace(monotonic=lambda: now))
        kit.reclaimer.observe("orders", ServerUnavailable("TRYAGAIN"))
        kit.reclaimer.observe("orders", None)
        kit.reclaimer.step(["orders"])
        assert cast.state(sent) == "retry"

    def test_a_removed_group_is_harmless(self, cast: Cast, kit: Services) -> None:
        kit.reclaimer.step(["orders"])
        cast.on("orders").store.call(Undeclare("orders", "g", [], True))
        kit.reclaimer.scan_all()
        instant(kit.reclaimer.step(["orders"]))
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
    def test_picks_topics_whose_streams_hold_anything(
        self, cast: Cast, kit: Services, raw: redis.Redis
    ) -> None:
        lost, idle, broken = (cast.on(name).declare() for name in ("lost", "idle", "broken"))
        for one in (cast, lost, idle, broken):
            kit.store.drive(kit.store.groups(one.topic))
        cast.send()
        lost.send()
        raw.delete(lost.own.ready)
        raw.set(broken.own.entries, "not a hash")
        assert kit.trimmer.pick(["broken", "idle", "lost", "orders", "unknown"]) == [
            "broken",
            "lost",
            "orders",
        ]

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
        assert seen == [sent, sent]
        assert seen_by == ["lisa-announcer"]
        assert "boom" in caplog.text
