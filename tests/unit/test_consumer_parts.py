"""The consumer's parts without a server: pace, slots, batches, models, running, settling."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from lisa.consumer import Batch
from lisa.consumer.batches import Collector
from lisa.consumer.handlers import Plan, Receiver
from lisa.consumer.held import Held, Verdict, heavier, reason_of, verdict_of
from lisa.consumer.pace import MOST, Pace
from lisa.consumer.running import NOBODY, arun, on_batch, on_message, on_message_here, run
from lisa.consumer.slots import Slots, Turn
from lisa.core.envelope import encode_envelope
from lisa.core.errors import InvalidMessage
from lisa.core.message import Message
from lisa.core.outcomes import Discard, Retry

if TYPE_CHECKING:
    pass


def held(name: str = "a", body: object = None) -> Held:
    message = Message(id=name, topic="orders", group="lisa", body=body, due_ms=0)
    return Held(f"{name}-1", message, encode_envelope("tokentok", body), 0, 0.0, 9e9)


def no_wait(_awaitable: object) -> object:
    raise AssertionError("nothing here is to be awaited")


def of(*handlers: Any, batch: Any = None) -> Plan:
    receivers = tuple(Receiver(handler) for handler in handlers)
    return Plan(receivers, Receiver(batch, batch=10) if batch else None)


# How much is read ahead


def test_nothing_is_read_ahead_before_a_handler_was_measured() -> None:
    assert Pace().ahead(8) == 0


@pytest.mark.parametrize(
    ("seconds", "handlers", "ahead"),
    [(0.1, 1, 0), (0.05, 1, 1), (0.01, 1, 5), (0.01, 4, 20), (1e-6, 1, MOST), (0.0, 8, MOST)],
)
def test_ahead_is_what_handlers_finish_in_50_ms(seconds: float, handlers: int, ahead: int) -> None:
    pace = Pace()
    pace.measured(seconds)
    assert pace.ahead(handlers) == ahead


def test_one_slow_message_ends_reading_ahead_at_once_and_fast_ones_bring_it_back() -> None:
    pace = Pace()
    for _ in range(100):
        pace.measured(0.0001)
    assert pace.ahead(1) == MOST
    pace.measured(2.0)
    assert pace.ahead(1) == 0
    for _ in range(100):
        pace.measured(0.0001)
    assert pace.ahead(1) > MOST * 0.8


# Slots


def test_slots_bound_and_go_round_robin_over_those_who_claim() -> None:
    slots = Slots(2)
    granted: list[str] = []
    grants = {name: lambda name=name: granted.append(name) for name in "abc"}
    slots.claim(grants["a"], 5)
    slots.claim(grants["b"], 2)
    slots.claim(grants["c"], 1)
    assert granted == ["a", "a"]
    assert [slots.waiting] == [True]
    for _ in range(6):
        slots.leave()
    assert "".join(granted) == "aa" + "abcaba"
    assert [slots.waiting] == [False]
    slots.leave()
    assert not slots.wait_all_free(0)
    slots.leave()
    assert slots.wait_all_free(0)
    assert slots.free == 2


def test_a_turn_that_is_called_off_takes_no_slot() -> None:
    slots = Slots(1)
    first, second = Turn(slots), Turn(slots)
    over = threading.Event()
    assert first.take(over.is_set)
    taken: list[bool] = []
    thread = threading.Thread(target=lambda: taken.append(second.take(over.is_set)))
    thread.start()
    over.set()
    second.wake()
    thread.join(5)
    assert taken == [False]
    first.leave()
    assert slots.free == 1


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
    with pytest.raises(InvalidMessage, match="not one of this batch"):
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
def test_what_a_handler_raises_says_what_follows(error: object, delay: object) -> None:
    assert verdict_of(error).delay == delay


def test_a_wish_to_try_again_outranks_a_discard() -> None:
    discard, again = Verdict("d", "discard"), Verdict("r")
    assert heavier(discard, again) is again
    assert heavier(again, discard) is again
    assert heavier(None, discard) is discard
    assert heavier(None, None) is None


# Running handlers


def test_all_receivers_run_even_if_one_raised() -> None:
    seen: list[str] = []

    def fails(message: Message) -> None:
        seen.append("fails")
        raise ValueError("boom")

    plan = of(fails, lambda message: seen.append("second"))
    verdict = run(on_message(plan, held()), no_wait)
    assert seen == ["fails", "second"]
    assert verdict is not None
    assert verdict.reason == "ValueError: boom"


@pytest.mark.parametrize(
    ("value", "failed"), [(False, True), (0, False), (None, False), ("", False)]
)
def test_only_false_itself_asks_for_a_retry(value: object, *, failed: bool) -> None:
    verdict = run(on_message(of(lambda message: value), held()), no_wait)
    assert (verdict is not None) is failed


def test_nobody_is_never_an_ack() -> None:
    assert run(on_message(of(), held()), no_wait) is NOBODY


def test_sys_exit_in_a_handler_is_a_failure() -> None:
    def leaves(message: Message) -> None:
        raise SystemExit(3)

    verdict = run(on_message(of(leaves), held()), no_wait)
    assert verdict is not None
    assert verdict.reason == "SystemExit: 3"


@pytest.mark.parametrize("error", [None, ValueError("boom"), SystemExit(3), Discard("no")])
@pytest.mark.parametrize("value", [None, False, 0])
def test_a_single_receiver_takes_a_shorter_way_to_the_same_verdict(
    error: BaseException | None, value: object
) -> None:
    def handle(message: Message) -> object:
        if error is not None:
            raise error
        return value

    plan = of(handle)
    here, there = on_message_here(plan, held(), no_wait), run(on_message(plan, held()), no_wait)
    assert (here is None) == (there is None) == (error is None and value is not False)
    if here is not None and there is not None:
        assert (here.reason, here.delay) == (there.reason, there.delay)


def test_an_error_of_lisas_own_in_a_handler_is_retried_not_discarded() -> None:
    def sends(message: Message) -> None:
        raise InvalidMessage("the handler sent something odd")

    verdict = run(on_message(of(sends), held()), no_wait)
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
    assert await arun(on_message(of(works), held())) is None
    assert await arun(on_message(of(works, fails), held())) is not None


def test_a_batch_settles_message_by_message() -> None:
    deliveries = [held(name) for name in "abc"]

    def handle(batch: Batch) -> None:
        batch.fail(batch[1], ValueError("only this one"))

    outcomes = run(on_batch(of(batch=handle), deliveries), no_wait)
    assert [outcome and outcome.reason for outcome in outcomes] == [
        None,
        "ValueError: only this one",
        None,
    ]


def test_a_batch_that_raises_retries_all_but_those_set_aside() -> None:
    def handle(batch: Batch) -> None:
        batch.fail(batch[0], Discard("hopeless"))
        raise ValueError("all")

    outcomes = run(on_batch(of(batch=handle), [held("a"), held("b")]), no_wait)
    assert [outcome and outcome.delay for outcome in outcomes] == ["discard", None]
