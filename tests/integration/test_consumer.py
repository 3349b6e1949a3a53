"""A consumer on a real server, with the manager's transitions called by the test."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lisa.consumer import Consumer, Delivery, reader
from lisa.core.delivery.opening import Opening
from lisa.core.delivery.pace import DEGRADED_AFTER
from lisa.core.model import stream
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.message import Message
from lisa.core.model.outcomes import Defer, Discard, Retry
from lisa.core.model.signals import everywhere
from lisa.core.redis.flow import Command, Flow
from lisa.core.transitions.delivery import Open, Opened
from lisa.core.transitions.garbage import Purge
from lisa.core.transitions.promote import Promote
from lisa.manager import Manager
from lisa.producer import Outgoing, Producer
from tests.consumers import Bench, Blocking, heard, settled, state_of
from tests.servers import flush, wait_until

pytestmark = pytest.mark.usefixtures("orders_declared")

TOPIC = "orders"


# From due to handled


def check_lateness(bench: Bench, count: int) -> None:
    """So many messages are counted, and none in the bucket of unknown lateness."""
    late = {name: n for name, n in bench.stats(TOPIC).items() if name.startswith("late:")}
    assert sum(late.values()) == count
    assert not any(name.startswith("late:-") for name in late)


def test_messages_are_handled_in_order_acked_and_leave_only_tombstones(server: str) -> None:
    bench = Bench(flush(server))
    bench.declare(TOPIC)
    consumer = Consumer(server)
    seen: list[Message] = []
    consumer.on(TOPIC, seen.append)
    before = datetime.now(UTC) - timedelta(seconds=5)
    ids = bench.send(TOPIC, [{"order": n} for n in range(300)])
    with consumer, bench.manager(TOPIC):
        bench.wait_acked(300)
    assert [message.id for message in seen] == ids
    assert [message.body["order"] for message in seen] == list(range(300))
    assert {(one.topic, one.group, one.attempt) for one in seen} == {(TOPIC, "lisa", 1)}
    assert [len(token) for token in {one.token for one in seen}] == [8]  # one call sent them all
    assert all(before < message.due < datetime.now(UTC) for message in seen)
    check_lateness(bench, 300)
    left = {key for key in bench.ask("KEYS", "*") if b":done:" not in key}
    assert not any(b":body:" in key or b":entries" in key for key in left)
    assert bench.ask("XLEN", bench.ready(TOPIC)) == 0


def test_no_handler_begins_with_what_was_replaced_unless_it_was_in_flight(bench: Bench) -> None:
    began, answers = dict[tuple[str, str], float](), dict[str, tuple[str, float]]()

    def handle(message: Message) -> None:
        began[message.id, message.body] = time.monotonic()
        time.sleep(0.002)

    consumer = Consumer(bench.url, concurrency=2)
    consumer.on(TOPIC, handle)
    with consumer, bench.manager(TOPIC), Producer(bench.url) as producer:
        for turn in range(6):
            ids = [f"{turn}-{n}" for n in range(50)]
            producer.send_many(TOPIC, [Outgoing("old", id=one) for one in ids], delay="20ms")
            for number, one in enumerate(ids):
                if number == 25:
                    wait_until(lambda: any((one, "old") in began for one in ids))  # noqa: B023
                sent = producer.send_one(TOPIC, "new", id=one, on_duplicate="replace")
                answers[one] = sent.outcome, time.monotonic()
        replaced = [one for one, (outcome, _) in answers.items() if outcome.startswith("replaced")]
        wait_until(lambda: all((one, "new") in began for one in replaced))
    later = {one for (one, body), at in began.items() if body == "old" and at > answers[one][1]}
    assert {answers[one][0] for one in later} <= {"replaced_in_flight"}
    assert {outcome for outcome, _ in answers.values()} >= {"replaced", "replaced_in_flight"}


@pytest.mark.parametrize("is_second_async", [False, True])
def test_l14_an_async_handler_is_acked_after_its_work(
    bench: Bench, *, is_second_async: bool
) -> None:
    """Also beside another handler, which runs after it."""
    go_on = threading.Event()
    seen: list[tuple[str, str]] = []

    async def asynchronous(message: Message) -> None:
        if message.body == "slow":
            await asyncio.to_thread(go_on.wait, 60)
        seen.append((message.body, "first"))

    def second(message: Message) -> None:
        seen.append((message.body, "second"))

    async def second_async(message: Message) -> None:
        second(message)

    consumer = bench.consumer(asynchronous, concurrency=2)
    consumer.on(TOPIC, second_async if is_second_async else second)
    slow, quick = bench.send(TOPIC, ["slow", "quick"])
    with consumer:
        wait_until(settled(bench, quick))
        assert bench.states(TOPIC, slow) == ["in_flight"]
        go_on.set()
        wait_until(settled(bench, slow))
    assert seen == [(body, kind) for body in ("quick", "slow") for kind in ("first", "second")]


def test_l14_nothing_is_acked_unheard_and_each_receiver_gets_its_own_topic(bench: Bench) -> None:
    bench.declare("invoices")
    [unheard] = bench.send("orders", [1])
    configured = Consumer.from_config(None, redis=bench.url, groups=[{"topic": "orders"}])
    with pytest.raises(ConfigError, match="topic 'orders' has no handler"):
        configured.start()
    assert bench.states("orders", unheard) == ["ready"]
    seen: list[tuple[str, int]] = []
    consumer = Consumer(bench.url)
    consumer.on("orders", lambda message: seen.append(("orders", message.body)))
    consumer.on("invoices", lambda message: seen.append(("invoices", message.body)))
    [other] = bench.send("invoices", [2])
    with consumer:
        wait_until(settled(bench, unheard, "orders"))
        wait_until(settled(bench, other, "invoices"))
    assert sorted(seen) == [("invoices", 2), ("orders", 1)]


# Results of handlers


def test_a_failed_message_is_retried_with_a_signal_for_each_step(bench: Bench) -> None:
    bench.declare(TOPIC, retry_delays="0,0")
    consumer = Consumer(bench.url)
    received = heard(consumer.message_received)
    retrying = heard(consumer.message_retrying)
    acked = heard(consumer.message_acked)

    @consumer.on(TOPIC)
    def handle(message: Message) -> None:
        if message.attempt < 3:
            raise ValueError(f"attempt {message.attempt}")

    bench.send(TOPIC, ["x"])
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: acked and len(retrying) == 2)
    assert [message.attempt for message in received] == [1, 2, 3]
    reasons = {(1, "ValueError: attempt 1"), (2, "ValueError: attempt 2")}
    assert {(message.attempt, message.reason) for message in retrying} == reasons
    assert all(message.next_due_ms for message in retrying)
    assert [(one.attempt, one.reason, one.next_due_ms) for one in acked] == [(3, None, None)]


class Attributes(Exception):
    def __getattr__(self, name: str) -> str:  # also asked for `__notes__`
        return {"known": "word"}[name]


class Later(Retry):
    def __init__(self) -> None:  # without `super().__init__`
        pass


class Speechless(Exception):
    def __str__(self) -> str:
        raise AttributeError("words")


class Silent(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


def group(*leaves: Exception) -> ExceptionGroup[Exception]:
    return ExceptionGroup("in tasks", leaves)


RAISED: dict[str, tuple[BaseException | type[BaseException], str, str | None]] = {
    # what a handler raises, the state of its message, and the reason that is kept
    "Discard": (Discard("no such order"), "garbage", "no such order"),
    "Retry": (Retry("later", delay=timedelta(hours=1)), "retry", "later"),
    "Defer": (Defer("busy", delay="1h"), "retry", "busy"),
    "ValueError": (ValueError("boom"), "retry", "ValueError: boom"),
    # As of a task group: leaves that fail count most, then Retry, then Defer.
    "a group of discards": (group(Discard("a"), group(Discard("b"))), "garbage", "a; b"),
    "a group to defer": (group(Discard("a"), Defer("b", delay="1h")), "retry", "a; b"),
    "a group to retry": (group(Defer("b", delay="2h"), Retry("c", delay="1h")), "retry", "b; c"),
    "a group that fails": (
        group(Discard("a"), Defer("b", delay="1h"), ValueError("c"), ValueError("c")),
        "retry",
        "ExceptionGroup: in tasks: Discard: a; Defer: b; ValueError: c",
    ),
    "SystemExit": (SystemExit(3), "retry", "SystemExit: 3"),
    "of a producer": (InvalidMessage("sent something odd"), "retry", None),
    "cancelled": (asyncio.CancelledError, "retry", None),
    # Exceptions whose own code fails.
    **{kind.__name__: (kind, "retry", None) for kind in (Attributes, Later, Speechless, Silent)},
}
RETURNED: dict[str, tuple[Callable[[], object], str, str | None]] = {
    # The same for what it returns; a generator is that of a decorator that hides `yield`.
    "False": (lambda: False, "retry", "the handler returned False"),
    "0": (lambda: 0, "acked", None),
    "text": (lambda: "", "acked", None),
    "generator": (lambda: (number for number in range(3)), "retry", None),
    "the class Retry": (lambda: Retry, "retry", None),
    "an object Retry": (lambda: Retry("soon", delay="1h"), "retry", None),
    "an object Defer": (lambda: Defer(delay="1h"), "retry", "the handler deferred the message"),
    "the class Defer": (lambda: Defer, "retry", None),
    "the class Discard": (lambda: Discard, "garbage", None),
    "an object Discard": (lambda: Discard("no"), "garbage", None),
}
DEFERRED = ("Defer", "a group to defer", "an object Defer")
UNAWAITED = "coroutine"
"""As of `call_next(message)` without `await`."""


def check_outcomes(
    bench: Bench, sent: dict[str, str], expected: dict[str, tuple[str, str | None]]
) -> None:
    for name, (state, reason) in expected.items():
        groups = bench.inspect(TOPIC, sent[name]).group_states
        assert state in [bench.settled_as(TOPIC, sent[name]), *[one.state for one in groups]], name
        assert reason is None or [one.reason for one in groups] == [reason]
        counts = {(one.failed_attempts, one.deferrals) for one in groups}
        assert counts <= {(0, 1) if name in DEFERRED else (1, 0)}, name
    now_ms = bench.store.drive(bench.store.server_time_ms())
    for name in ("Retry", "Defer", "a group to defer", "a group to retry"):
        due_ms = bench.inspect(TOPIC, sent[name]).group_states[0].due_ms
        assert due_ms is not None
        assert 3_500_000 < due_ms - now_ms <= 3_600_000, name


@pytest.mark.parametrize("batch", [None, 1])
@pytest.mark.parametrize("is_async", [False, True])
def test_the_handler_s_outcome_decides(bench: Bench, batch: int | None, *, is_async: bool) -> None:
    bench.configure(TOPIC, retry_delays="1h")
    made: list[Coroutine[Any, Any, None]] = []

    async def work() -> None: ...

    def outcome_of(given: Any) -> object:
        name = given[0].body if batch else given.body
        if name in RAISED:
            raise RAISED[name][0]
        if name in RETURNED:
            return RETURNED[name][0]()
        made.append(work())
        return made[-1]

    async def handle_async(given: Any) -> object:
        return outcome_of(given)

    def handle(given: Any) -> object:
        is_coroutine = (given[0].body if batch else given.body) == UNAWAITED
        return handle_async(given) if is_coroutine else outcome_of(given)

    consumer = Consumer(bench.url, concurrency=2)
    consumer.on(TOPIC, handle_async if is_async else handle, batch=batch)
    expected = {name: outcome[1:] for name, outcome in (RAISED | RETURNED).items()}
    expected[UNAWAITED] = ("retry", None)
    if not is_async:
        del expected["cancelled"]
    sent = dict(zip(expected, bench.send(TOPIC, expected), strict=True))
    with consumer:
        wait_until(lambda: not bench.ask("XLEN", bench.ready(TOPIC)))
        wait_until(lambda: consumer.health()["topics"][f"{TOPIC}/lisa"]["held"] == 0)
    check_outcomes(bench, sent, expected)
    for coroutine in made:
        coroutine.close()


@pytest.mark.parametrize("batch", [None, 2])
def test_a_deferred_message_comes_again_with_the_same_attempt(
    bench: Bench, batch: int | None
) -> None:
    """Any number of times, although a failure would be final; only a ttl ends it."""
    bench.declare(TOPIC, retry_delays="")
    seen: list[int] = []
    consumer = Consumer(bench.url)
    dead = heard(consumer.message_dead)

    @consumer.on(TOPIC, batch=batch, within="10ms" if batch else None)
    def handle(given: Any) -> None:
        for message in given if batch else [given]:
            seen.extend([message.attempt] * (message.body == "deferred"))
            busy = Defer("busy", delay="20ms")
            if message.body == "deferred" and len(seen) > DEGRADED_AFTER:
                continue
            if not batch:
                raise busy
            given.fail(message, busy)

    deferred, ending = [*bench.send(TOPIC, ["deferred"]), *bench.send(TOPIC, ["x"], ttl_ms=200)]
    with consumer, Manager(bench.url):
        wait_until(settled(bench, deferred))
        wait_until(lambda: bench.settled_as(TOPIC, ending) == "expired")
        assert consumer.health()["topics"][f"{TOPIC}/lisa"]["state"] == "running"
    assert seen == [1] * (DEGRADED_AFTER + 1)
    assert not dead
    assert bench.stat(TOPIC, "deferred") >= DEGRADED_AFTER + 1


def test_an_ack_that_did_not_count_is_not_announced(bench: Bench) -> None:
    """The lease ended, and the message was purged."""
    bench.declare(TOPIC, ack_timeout="1s", retry_delays="")
    consumer, handler = Consumer(bench.url), Blocking()
    acked = heard(consumer.message_acked)
    consumer.on(TOPIC, handler, timeout="800ms")
    [gone] = bench.send(TOPIC, ["gone"])
    with consumer:
        with bench.manager(TOPIC):
            wait_until(lambda: bench.states(TOPIC, gone) == ["garbage"])
        assert bench.store.call(Purge(TOPIC, "lisa", [gone])) == [True]
        handler.go_on.set()
        [good] = bench.send(TOPIC, ["good"])
        wait_until(settled(bench, good))
        wait_until(lambda: acked)
    assert [message.id for message in acked] == [good]


def test_the_wait_of_a_suspect_is_no_part_of_its_timeout(bench: Bench) -> None:
    """What a process held when it ended begins one at a time, and then has all of its time."""
    bench.declare(TOPIC, retry_delays="")
    seen: list[int] = []

    async def handle(message: Message) -> None:
        await asyncio.sleep(0.3)
        seen.append(message.body)

    bench.send(TOPIC, range(4))
    bench.store.call(Promote(TOPIC))
    ready = bench.ready(TOPIC)
    read = bench.ask("XREADGROUP", "GROUP", "lisa", "gone-h", "STREAMS", ready, ">")
    entries = [entry for entry, _ in read[0][1]]
    bench.ask("XCLAIM", ready, "lisa", "gone-h", 0, *entries, "IDLE", 60_000, "JUSTID")
    consumer = Consumer(bench.url, concurrency=4)
    consumer.on(TOPIC, handle, timeout="800ms")
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: bench.stat(TOPIC, "acked") + bench.stat(TOPIC, "garbage") == 4)
    assert sorted(seen) == [0, 1, 2, 3]


def test_all_receivers_run_and_one_failure_retries(bench: Bench) -> None:
    seen: list[str] = []
    consumer = Consumer(bench.url)

    def module_wide(topic: str, *, message: Message) -> None:
        seen.append("module-wide")

    def fails(message: Message) -> None:
        seen.append("fails")
        raise ValueError("boom")

    everywhere.received.connect(module_wide, sender=TOPIC)
    consumer.on(TOPIC, fails)
    consumer.on(TOPIC, lambda message: seen.append("own"))
    [sent] = bench.send(TOPIC, [1])
    with consumer:
        wait_until(lambda: seen and not bench.ask("XLEN", bench.ready(TOPIC)))
    assert sorted(seen) == ["fails", "module-wide", "own"]
    assert bench.states(TOPIC, sent) == ["retry"]


def test_an_expired_message_is_not_handed_out(bench: Bench) -> None:
    consumer, seen = bench.recorder()
    expired = heard(consumer.message_expired)
    [sent] = bench.send(TOPIC, [1], ttl_ms=1)
    assert bench.states(TOPIC, sent) == ["ready"]
    time.sleep(0.02)
    with consumer:
        wait_until(lambda: expired)
    assert ([message.id for message in expired], seen) == ([sent], [])
    assert bench.settled_as(TOPIC, sent) == "expired"


# Bodies


def test_a_body_that_cannot_be_read_is_moved_to_garbage_with_the_reason(bench: Bench) -> None:
    """Unless its form is unknown: a newer process may know it at the next attempt."""
    foreign = {
        b"1tokentok-j0000{nonsense": ("garbage", "the body cannot be decoded"),
        b"1to": ("garbage", "cut short"),
        b'1tokentok-j0000"text"': ("garbage", "the body does not match int"),
        b"9whatever": ("retry", "unknown envelope version"),
        b"1tokentok-x0000": ("retry", "unknown kind of body"),
    }
    consumer, seen = Consumer(bench.url), list[Message]()
    consumer.on(TOPIC, seen.append, model=int)
    dead = heard(consumer.message_dead)
    pulled: list[Delivery] = []
    for read in ("by handlers", "by a pull"):
        *ids, good = bench.send(TOPIC, range(len(foreign) + 1))
        for one, written in zip(ids, foreign, strict=True):
            bench.ask("SET", bench.store.keys.topic(TOPIC).body(one), written)
        if read == "by handlers":
            with consumer:
                wait_until(settled(bench, good))
                wait_until(lambda: len(dead) == 3)
                wait_until(lambda: bench.pending(TOPIC) == 0)
        else:
            pulled += consumer.pull(TOPIC, batch=9)
        for one, (state, reason) in zip(ids, foreign.values(), strict=True):
            if read == "by handlers" or "match" not in reason:
                assert bench.states(TOPIC, one) == [state]
                assert reason in (bench.inspect(TOPIC, one).group_states[0].reason or "")
    assert [message.body for message in seen] == [5]
    assert [one.body for one in pulled] == ["text", 5]


def test_l24_no_module_named_by_a_message_is_imported(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under any key that other formats use for a class, in the body and in headers."""
    (tmp_path / "sprung.py").write_text("class Order: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("clazz", "@class", "@type", "__class__", "__type__", "py/object", "py/type")
    named = dict.fromkeys(names, "sprung.Order")
    pickled = b"\x80\x04\x8c\x06sprung\x8c\x05Order\x93."
    seen: list[Message] = []
    consumer = Consumer(bench.url)
    for topic, model in ((TOPIC, None), ("typed", dict[str, str]), ("pickled", bytes)):
        bench.declare(topic)
        consumer.on(topic, seen.append, model=model)
    with consumer, Producer(bench.url) as producer:
        for topic, body in ((TOPIC, named), ("typed", named), ("pickled", pickled)):
            producer.send(topic, body, headers=named)
        wait_until(lambda: len(seen) == 3)
    assert all(message.headers == named for message in seen)
    bodies = {message.topic: message.body for message in seen}
    assert bodies == {TOPIC: named, "typed": named, "pickled": pickled}
    assert "sprung" not in sys.modules


def test_entries_without_a_body_or_an_id_are_cleared_and_counted(bench: Bench) -> None:
    gone, _ = bench.send(TOPIC, [1, 2])
    bench.ask("DEL", bench.store.keys.topic(TOPIC).body(gone))
    bench.ask("XADD", bench.ready(TOPIC), "*", "foreign", "entry")
    bench.ask("XADD", bench.ready(TOPIC), "*", "id", b"\xff\xfe", "due", "1")
    bench.send(TOPIC, [3])
    consumer, seen = bench.recorder()
    with consumer:
        wait_until(lambda: bench.stat(TOPIC, "cleared") >= 2 and seen == [2, 3])
        wait_until(lambda: not bench.ask("XLEN", bench.ready(TOPIC)))


# A handler's own retry policy


@pytest.mark.parametrize("batch", [None, 1])
def test_the_pauses_of_a_handler_replace_those_of_the_topic(
    bench: Bench, batch: int | None
) -> None:
    """The topic limits the attempts, and an explicit pause replaces the handler's."""
    bench.declare(TOPIC, retry_delays="1h,1h")
    seen: list[int] = []
    consumer = Consumer(bench.url)

    @consumer.on(TOPIC, retry="0s,20ms,0s", batch=batch)
    def handle(given: Any) -> None:
        message = given[0] if batch else given
        if message.body == "later":
            raise Retry(delay="1h")
        seen.append(message.attempt)
        raise ValueError("no")

    dead = heard(consumer.message_dead)
    limited, waiting = bench.send(TOPIC, ["now", "later"])
    with consumer, bench.manager(TOPIC):
        wait_until(lambda: bench.states(TOPIC, limited) == ["garbage"])
        wait_until(lambda: bench.states(TOPIC, waiting) == ["retry"])
        wait_until(lambda: dead)
    assert seen == [1, 2, 3]
    assert [(message.reason, message.attempt) for message in dead] == [("ValueError: no", 3)]
    assert bench.inspect(TOPIC, limited).group_states[0].reason == "ValueError: no"


def promoted(bench: Bench, body: object) -> str:
    """Send a message and promote it with its envelope."""
    (message_id,) = bench.send(TOPIC, [body], delay_ms=1)
    wait_until(lambda: bench.store.call(Promote(TOPIC, expected=[message_id])).moved == 1)
    return message_id


def promoted_while_read(bench: Bench, body: object) -> str:
    """The same once a consumer waits for messages."""
    wait_until(bench.is_reading)
    return promoted(bench, body)


def test_a_waiting_consumer_asks_nothing_more_about_entries_with_envelopes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, asked, blocks_ms = list[Message](), list[object](), list[int]()
    read = Opening._read

    def read_and_note(opening: Opening, call: Open) -> Flow[Opened | None]:
        asked.append(call)
        return read(opening, call)

    def command_and_note(*arguments: Any) -> Command:
        blocks_ms.append(arguments[-1])
        return stream.read_all_command(*arguments)

    monkeypatch.setattr(Opening, "_read", read_and_note)
    monkeypatch.setattr(reader, "read_all_command", command_and_note)
    with bench.consumer(seen.append):
        for number in range(5):
            wait_until(settled(bench, promoted_while_read(bench, number)))
        wait_until(lambda: seen[4:] and bench.is_reading())
    assert [message.body for message in seen] == list(range(5))
    assert len(asked) == 1, "the first read did not ask for the topic's state"
    assert 0 < blocks_ms[-1] <= 10_000 / 4, "no lease needs a restart, however long it waits"
    check_lateness(bench, 5)


class HeldUp(NamedTuple):
    """A consumer in a handler, while an entry with its envelope waits."""

    consumer: Consumer
    handler: Blocking
    waits: str


@pytest.fixture
def held_up(bench: Bench) -> Iterator[HeldUp]:
    handler = Blocking("long")

    consumer = bench.consumer(handler)
    with consumer:
        for body in ("first", "long"):
            promoted_while_read(bench, body)
            wait_until(partial(handler.begun.__contains__, body))
        yield HeldUp(consumer, handler, promoted(bench, "waits"))


def test_an_entry_that_waited_is_not_handed_out_during_a_pause(
    bench: Bench, held_up: HeldUp
) -> None:
    bench.configure(TOPIC, paused=True)
    held_up.handler.go_on.set()
    wait_until(lambda: state_of(held_up.consumer) == "paused")
    assert bench.states(TOPIC, held_up.waits) == ["ready"]
    assert held_up.handler.begun == ["first", "long"]
    bench.configure(TOPIC, paused=False)
    wait_until(lambda: "waits" in held_up.handler.begun)


def test_entries_of_a_removed_group_are_not_handed_out(bench: Bench, held_up: HeldUp) -> None:
    """Its stream remains until its messages are settled, page by page."""
    bench.ask("HDEL", bench.store.keys.topic(TOPIC).groups, "lisa")  # the removal's first step
    held_up.handler.go_on.set()
    wait_until(lambda: state_of(held_up.consumer) == "removed")
    assert held_up.handler.begun == ["first", "long"]
