"""The consumer's parts without a server: pace, slots, batches, models, running, settling."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from redis import exceptions

from lisa.consumer import Batch
from lisa.consumer.ack_sharing import AckSharing
from lisa.consumer.batches import Collector
from lisa.consumer.handlers import Handlers
from lisa.consumer.inflight import Verdict, combined, verdict_of
from lisa.consumer.invoke import NO_RECEIVER, on_batch, on_message, on_message_sync
from lisa.consumer.prefetch import MOST_AHEAD, Pace
from lisa.consumer.receivers import HandlerPlan, Receiver
from lisa.consumer.slots import SlotClaim, Slots, TopicSlots
from lisa.consumer.tasks import HandlerTasks
from lisa.core.delivery.opening import (
    DEFAULT_ACK_MS,
    PlainState,
    StreamRead,
    from_entries,
    parse_state,
)
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.message import Message
from lisa.core.model.outcomes import Discard, Retry, reason_of
from lisa.core.model.stream import Entry
from lisa.core.redis.flow import adrive, drive
from lisa.core.transitions.open import Opened
from tests.servers import PATIENCE
from tests.unit.deliveries import held, no_wait


def of(*handlers: Any, batch: Any = None) -> HandlerPlan:
    receivers = tuple(Receiver(handler) for handler in handlers)
    return HandlerPlan(receivers, Receiver(batch, batch=10) if batch else None)


# How much is read ahead


def test_nothing_is_prefetched_before_the_first_measurement() -> None:
    assert Pace().ahead(8) == 0


@pytest.mark.parametrize(
    ("seconds", "handlers", "ahead"),
    [
        (0.1, 1, 0),
        (0.05, 1, 1),
        (0.01, 1, 5),
        (0.01, 4, 20),
        (1e-6, 1, MOST_AHEAD),
        (0.0, 8, MOST_AHEAD),
    ],
)
def test_reading_ahead_covers_50_ms_of_handling(seconds: float, handlers: int, ahead: int) -> None:
    pace = Pace()
    pace.measured(seconds)
    assert pace.ahead(handlers) == ahead


def test_a_slow_message_ends_reading_ahead_and_fast_ones_restart_it() -> None:
    pace = Pace()
    for _ in range(100):
        pace.measured(0.0001)
    assert pace.ahead(4) == MOST_AHEAD
    pace.measured(2.0)
    assert pace.ahead(4) == 0
    for _ in range(100):
        pace.measured(0.0001)
    assert pace.ahead(4) > MOST_AHEAD * 0.8


# Slots


def test_slots_are_limited_and_granted_round_robin() -> None:
    slots = Slots(2)
    granted: list[str] = []
    grants = {name: lambda name=name: granted.append(name) for name in "abc"}
    slots.claim(grants["a"], 5)
    slots.claim(grants["b"], 2)
    slots.claim(grants["c"], 1)
    assert granted == ["a", "a"]
    assert [slots.waiting] == [True]
    for _ in range(6):
        slots.release()
    assert "".join(granted) == "aa" + "abcaba"
    assert [slots.waiting] == [False]
    slots.release()
    assert not slots.wait_all_free(0)
    slots.release()
    assert slots.wait_all_free(0)
    assert slots.free == 2


def test_slots_are_waited_for_longer_than_a_thread_can_wait() -> None:
    slots = Slots(1)
    slots.claim(lambda: None)
    threading.Timer(0.05, slots.release).start()
    assert slots.wait_all_free(timedelta.max.total_seconds())


def test_a_task_that_is_cancelled_before_it_starts_frees_its_slot() -> None:
    slots, handlers = Slots(1), Handlers()
    tasks = HandlerTasks(handlers, Mock())
    work: list[Any] = [SimpleNamespace(run_in=lambda task: task.cancel())]
    sub: Any = SimpleNamespace(
        topic="t",
        shard="t",
        wanted="",
        slots=slots,
        unstarted=SimpleNamespace(take=lambda: work.pop() if work else None),
        fail_unhandled=Mock(),
    )
    slots.claim(tasks.grant(sub))
    assert slots.wait_all_free(PATIENCE.total_seconds())
    assert not work
    tasks.close()


def test_a_cancelled_claim_takes_no_slot() -> None:
    slots = Slots(1)
    first, second = SlotClaim(slots), SlotClaim(slots)
    over = threading.Event()
    assert first.take(over.is_set)
    taken: list[bool] = []
    thread = threading.Thread(target=lambda: taken.append(second.take(over.is_set)))
    thread.start()
    over.set()
    second.wake()
    thread.join(5)
    assert taken == [False]
    first.release()
    assert slots.free == 1


def test_a_claim_that_is_over_before_it_waits_takes_no_slot() -> None:
    """An earlier wait may have used up the only `wake`."""
    slots, taken = Slots(1), list[bool]()
    first, second = SlotClaim(slots), SlotClaim(slots)
    assert first.take(lambda: False)
    thread = threading.Thread(target=lambda: taken.append(second.take(lambda: True)), daemon=True)
    thread.start()
    thread.join(5)
    assert taken == [False]
    first.release()
    assert slots.free == 1


def test_the_slots_of_a_topic_are_some_of_the_shared_ones() -> None:
    shared, granted = Slots(3), list[str]()
    slots = TopicSlots(shared, 2)
    for name in "ab":  # two shards of the topic
        slots.claim(partial(granted.append, name), 2)
    assert granted == ["a", "a"]
    assert (slots.size, slots.free, shared.free, slots.waiting) == (2, 0, 1, True)
    other = partial(granted.append, "other")
    shared.claim(other, 2)
    assert granted == ["a", "a", "other"]
    slots.release()  # the other topic's claim is first in the shared line
    assert granted == ["a", "a", "other", "other"]
    for _ in range(2):
        shared.release()
    slots.release()
    assert granted[4:] == ["b", "b"]
    for _ in range(2):
        slots.release()
    assert (slots.free, shared.free, slots.waiting) == (2, 3, False)
    assert TopicSlots(shared, 9).size == 3


def test_a_withdrawn_claim_of_a_topic_leaves_no_slot_taken() -> None:
    shared, granted = Slots(1), list[str]()
    slots = TopicSlots(shared, 1)
    first, second = partial(granted.append, "first"), partial(granted.append, "second")
    shared.claim(partial(granted.append, "busy"))
    slots.claim(first)  # has the topic's slot and waits for a shared one
    slots.claim(second)  # waits for the topic's slot
    assert (slots.withdraw(first), slots.withdraw(second)) == (1, 1)
    shared.release()
    assert granted == ["busy"]
    assert (slots.free, shared.free, slots.waiting) == (1, 1, False)
    slots.claim(second)
    assert granted == ["busy", "second"]


# Batches


def test_a_batch_is_ready_when_full() -> None:
    collector = Collector(3, 60)
    collector.add([held(name) for name in "abcdefgh"])
    assert [[one.message.id for one in batch] for batch in collector.ready()] == [
        ["a", "b", "c"],
        ["d", "e", "f"],
    ]
    left = collector.left_s()
    assert left is not None
    assert 59 < left <= 60
    assert [one.message.id for one in collector.take()] == ["g", "h"]
    assert collector.left_s() is None


def test_a_batch_is_ready_when_its_first_has_waited_long_enough() -> None:
    collector = Collector(3, 0)
    collector.add([held("a")])
    assert collector.left_s() == 0
    assert len(collector.ready()) == 1
    assert not collector


def test_a_batch_is_a_sequence_and_fails_only_its_own_messages() -> None:
    one, other = held("a").message, held("a").message
    batch = Batch([one])
    assert (len(batch), batch[0], list(batch)) == (1, one, [one])
    with pytest.raises(InvalidMessage, match="not in this batch"):
        batch.fail(other, "why")
    batch.fail(one, Retry(delay=timedelta(seconds=2)))
    assert batch.verdict(one) == Verdict("the handler asked for a retry", 2000)


# Verdicts


def test_reasons_name_the_exception_within_1_kib() -> None:
    assert reason_of(ValueError("no stock")) == "ValueError: no stock"
    assert reason_of(KeyError()) == "KeyError"
    long = reason_of(ValueError("ü" * 2000))
    assert len(long.encode()) in (1023, 1024)


@pytest.mark.parametrize(
    ("error", "delay"),
    [
        (Retry("later"), None),
        (Retry(delay=timedelta(milliseconds=1.5)), 2),
        (Retry(delay=timedelta(0)), 0),
        (Discard("bad"), "discard"),
        (ValueError("x"), None),
        ("said in words", None),
    ],
)
def test_exceptions_become_verdicts(error: object, delay: object) -> None:
    assert verdict_of(error).delay == delay


@pytest.mark.parametrize("pause", [5, 0.5, timedelta(minutes=5)])
def test_a_pause_as_the_reason_of_a_retry_is_refused(pause: Any) -> None:
    with pytest.raises(InvalidMessage, match=r"write Retry\(delay="):
        Retry(pause)
    assert str(Retry(ValueError("busy"))) == "busy"  # type: ignore[arg-type]


def test_a_retry_after_the_year_9999_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="ends beyond the year 9999"):
        Retry(delay=timedelta.max)


def test_a_retry_takes_precedence_over_a_discard() -> None:
    discard, again = Verdict("d", "discard"), Verdict("r")
    assert combined(discard, again) is again
    assert combined(again, discard) is again
    assert combined(None, discard) is discard
    assert combined(None, None) is None


# Running handlers


def test_all_receivers_run_even_if_one_raised() -> None:
    seen: list[str] = []

    def fails(message: Message) -> None:
        seen.append("fails")
        raise ValueError("boom")

    plan = of(fails, lambda message: seen.append("second"))
    verdict = drive(on_message(plan, held()), no_wait)
    assert seen == ["fails", "second"]
    assert verdict is not None
    assert verdict.reason == "ValueError: boom"


@pytest.mark.parametrize(
    ("value", "failed"), [(False, True), (0, False), (None, False), ("", False)]
)
def test_only_false_itself_asks_for_a_retry(value: object, *, failed: bool) -> None:
    verdict = drive(on_message(of(lambda message: value), held()), no_wait)
    assert (verdict is not None) is failed


def test_a_message_without_a_receiver_is_not_acked() -> None:
    assert drive(on_message(of(), held()), no_wait) is NO_RECEIVER


def test_sys_exit_in_a_handler_is_a_failure() -> None:
    def leaves(message: Message) -> None:
        raise SystemExit(3)

    verdict = drive(on_message(of(leaves), held()), no_wait)
    assert verdict is not None
    assert verdict.reason == "SystemExit: 3"


@pytest.mark.parametrize("error", [None, ValueError("boom"), SystemExit(3), Discard("no")])
@pytest.mark.parametrize("value", [None, False, 0])
def test_the_shortcut_for_one_receiver_gives_the_same_verdict(
    error: BaseException | None, value: object
) -> None:
    def handle(message: Message) -> object:
        if error is not None:
            raise error
        return value

    plan = of(handle)
    here, there = on_message_sync(plan, held(), no_wait), drive(on_message(plan, held()), no_wait)
    assert (here is None) == (there is None) == (error is None and value is not False)
    if here is not None and there is not None:
        assert (here.reason, here.delay) == (there.reason, there.delay)


def test_an_error_of_lisas_own_in_a_handler_is_retried_not_discarded() -> None:
    def sends(message: Message) -> None:
        raise InvalidMessage("the handler sent something odd")

    verdict = drive(on_message(of(sends), held()), no_wait)
    assert verdict is not None
    assert not verdict.is_discard


async def test_async_receivers_are_awaited() -> None:
    async def works(message: Message) -> None:
        await asyncio.sleep(0)

    async def fails(message: Message) -> bool:
        await asyncio.sleep(0)
        return False

    assert of(works).is_async
    assert not of(works, lambda message: None).is_async
    assert await adrive(on_message(of(works), held()), None) is None
    assert await adrive(on_message(of(works, fails), held()), None) is not None


def test_a_batch_settles_message_by_message() -> None:
    deliveries = [held(name) for name in "abc"]

    def handle(batch: Batch) -> None:
        batch.fail(batch[1], ValueError("only this one"))

    outcomes = drive(on_batch(of(batch=handle), deliveries), no_wait)
    assert [outcome and outcome.reason for outcome in outcomes] == [
        None,
        "ValueError: only this one",
        None,
    ]


def test_a_batch_that_raises_retries_all_but_those_set_aside() -> None:
    def handle(batch: Batch) -> None:
        batch.fail(batch[0], Discard("hopeless"))
        raise ValueError("all")

    outcomes = drive(on_batch(of(batch=handle), [held("a"), held("b")]), no_wait)
    assert [outcome and outcome.delay for outcome in outcomes] == ["discard", None]


@pytest.mark.parametrize("has_batch", [False, True])
async def test_a_cancelled_batch_calls_no_further_receivers(*, has_batch: bool) -> None:
    deliveries, calls = [held(name) for name in "abc"], list[str]()
    begun = asyncio.Event()

    async def slow(message: Message) -> None:
        calls.append(message.id)
        if message.id == "b":
            begun.set()
            await asyncio.sleep(60)

    def handle(_: Batch) -> None:
        calls.append("batch")

    plan = of(slow, batch=handle if has_batch else None)
    task = asyncio.ensure_future(adrive(on_batch(plan, deliveries), None))
    for one in deliveries:
        one.run_in(task)
    await begun.wait()
    deliveries[0].stop_extending()
    outcomes = await task
    assert calls == ["a", "b"]
    assert [outcome is not None for outcome in outcomes] == [has_batch, True, True]


async def test_a_receiver_that_ends_with_a_cancellation_of_its_own_fails_one_message() -> None:
    async def handle(message: Message) -> None:
        if message.id == "a":
            raise asyncio.CancelledError

    outcomes = await adrive(on_batch(of(handle), [held("a"), held("b")]), None)
    assert [outcome is not None for outcome in outcomes] == [True, False]


class TestFromEntries:
    """The server's clock shows 5,000.300 ms when the read begins, which takes 10 ms."""

    READ = StreamRead(asked_at=100.0, read_at=100.010, state=PlainState(5_000_300, 9_000))

    @pytest.mark.parametrize(
        ("times", "leased_at", "ack_timeout_ms"),
        [
            ([5_001], 100.0007, 7_000),
            ([5_003, 5_002], 100.0017, 7_000),
            ([5_010], 100.0097, 7_000),
            ([4_000], 100.0, 9_000),
            ([5_000], 100.0, 9_000),  # perhaps added before the read
            ([5_000, 5_001], 100.0, 7_000),
            ([5_011], 100.0, 9_000),  # later than now: the clock was set
        ],
    )
    def test_a_lease_begins_when_the_entry_was_added_or_the_read_began(
        self, times: list[int], leased_at: float, ack_timeout_ms: int
    ) -> None:
        entries = [Entry(f"{ms}-0", f"m{ms}", 4_990, 1, 7_000, b"body") for ms in times]
        found = from_entries(entries, self.READ)
        assert found is not None
        opened, began_at = found
        assert began_at == pytest.approx(leased_at)
        n, now_us = len(entries), max(5_010_300, *(1_000 * ms for ms in times))
        assert opened == Opened(now_us, ack_timeout_ms, False, [False] * n, [b"body"] * n)

    @pytest.mark.parametrize(
        ("times", "leased_at"),
        [
            ([4_999], 102.9987),
            ([4_999, 3_000], 100.9997),
            ([1_000], 100.0),  # before the read
            ([5_011], 100.0),  # later than now: the clock was set
        ],
    )
    def test_a_state_that_was_read_later_tells_how_long_ago_the_entry_was_added(
        self, times: list[int], leased_at: float
    ) -> None:
        """The read began at 100, and the state was asked for at 103."""
        read = self.READ._replace(read_at=103.010, state_asked_at=103.0)
        entries = [Entry(f"{ms}-0", f"m{ms}", 900, 1, 7_000, b"body") for ms in times]
        found = from_entries(entries, read)
        assert found is not None
        opened, began_at = found
        assert began_at == pytest.approx(leased_at)
        assert opened.ack_timeout_ms == 9_000
        assert opened.now_us == max(5_010_300, *(1_000 * ms for ms in times))

    @pytest.mark.parametrize(("ms", "is_known"), [(5_001, True), (5_000, False), (5_011, False)])
    def test_with_the_clock_alone_only_entries_added_later_are_opened(
        self, ms: int, *, is_known: bool
    ) -> None:
        read = self.READ._replace(state=PlainState(5_000_300, None))
        entry = Entry(f"{ms}-0", "m", 4_990, 1, 7_000, b"body")
        found = from_entries([entry], read)
        assert (found is not None) == is_known
        if found is not None:
            assert found[0].ack_timeout_ms == 7_000

    def test_all_must_carry_bodies_and_the_state_must_be_known(self) -> None:
        whole, empty = Entry("5001-0", "a", 1, 1, 7_000, b"body"), Entry("5002-0", "b", 1, 1)
        assert from_entries([whole, empty], self.READ) is None
        assert from_entries([whole], self.READ._replace(state=None)) is None

    @pytest.mark.parametrize(("ms", "is_opened"), [(5_001, True), (5_000, False), (5_011, False)])
    def test_without_a_state_of_the_same_packet_only_entries_added_later_are_opened(
        self, ms: int, is_opened: object
    ) -> None:
        entry = Entry(f"{ms}-0", "a", 1, 1, 7_000, b"body")
        found = from_entries([entry], self.READ._replace(is_adjacent=False))
        assert (found is not None) == is_opened

    @pytest.mark.parametrize(
        ("declared", "options", "state"),
        [
            (1, [None, None, None, None], PlainState(5_000_300, DEFAULT_ACK_MS)),
            (1, [b"7000", b"0", b"0", b""], PlainState(5_000_300, 7_000)),
            (1, [None, b"1", None, None], None),
            (1, [None, None, b"1", None], None),
            (1, [None, None, None, b"9-17"], None),
            (0, [None, None, None, None], None),
            (1, exceptions.NoPermissionError("HMGET"), None),
        ],
    )
    def test_a_paused_topic_a_removed_group_a_journal_or_a_window_needs_a_call(
        self, declared: int, options: Any, state: PlainState | None
    ) -> None:
        assert parse_state([[b"5", b"300"], declared, options]) == state


class TestAckSharing:
    @pytest.fixture
    def sharing(self) -> AckSharing:
        """After a hundred messages, one each millisecond; the last at 0.1 s."""
        sharing = AckSharing()
        for ms in range(1, 101):
            sharing.arrived(ms / 1_000)
        return sharing

    def test_acks_wait_for_at_most_five_milliseconds(self, sharing: AckSharing) -> None:
        waits = [sharing.wait_ms(acks, 0.1 + acks / 1_000) for acks in range(1, 6)]
        assert waits == [5, 4, 3, 2, 0]
        assert sharing.wait_ms(1, 0.106) == 5, "later acks start a new wait"

    def test_none_waits_if_no_other_will_follow_in_time(self, sharing: AckSharing) -> None:
        for number in range(20):
            sharing.arrived(0.2 + number * 0.006)
        assert sharing.wait_ms(1, 0.32) == 0

    @pytest.mark.parametrize("acks", [0, 16])
    def test_none_waits_without_acks_or_with_many(self, sharing: AckSharing, acks: int) -> None:
        assert sharing.wait_ms(acks, 0.1) == 0

    def test_the_first_message_s_ack_does_not_wait(self) -> None:
        assert AckSharing().wait_ms(1, 0.0) == 0
