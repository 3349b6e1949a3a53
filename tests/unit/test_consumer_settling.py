"""The consumer's typed bodies, handlers and settler, without a server."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict, cast

import msgspec
import pydantic
import pytest
import redis

from lisa.consumer import Consumer
from lisa.consumer.handlers import Handlers
from lisa.consumer.inflight import Held, Verdict
from lisa.consumer.keyed_pool import KeyedPool
from lisa.consumer.models import BodyMismatch, reader_for
from lisa.consumer.settler import CLOSING_S, Settler
from lisa.consumer.signal_queue import SignalSender
from lisa.consumer.slots import Slots
from lisa.consumer.subscription import Subscription
from lisa.core.model.backoff import Backoff
from lisa.core.model.envelope import decode_envelope, encode_envelope
from lisa.core.model.errors import ConfigError, GroupRemoved, ServerUnavailable
from lisa.core.model.message import Message
from lisa.core.model.sharding import Shard
from lisa.core.model.signals import Signals
from lisa.core.redis.flow import Execute
from lisa.core.transitions.ack import Ack, Acked
from lisa.core.transitions.retry import Failed, Retried
from tests.consumers import heard
from tests.servers import wait_until
from tests.unit.deliveries import held

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lisa.core.redis.flow import Flow
    from lisa.core.transitions.base import Transition


# Typed bodies


class Order(msgspec.Struct):
    order: int


@dataclass
class DataOrder:
    order: int


class TypedOrder(TypedDict):
    order: int


class PydanticOrder(pydantic.BaseModel):
    order: int


@pytest.mark.parametrize("model", [Order, DataOrder, TypedOrder, PydanticOrder])
def test_a_body_is_decoded_as_its_model_or_refused(model: Any) -> None:
    read = reader_for(model)
    found = read(decode_envelope(encode_envelope("tokentok", {"order": 42})))
    assert (found["order"] if isinstance(found, dict) else found.order) == 42
    for body in ({"order": "x"}, {"other": 1}, [1], "text", b"\xff"):
        with pytest.raises(BodyMismatch, match=f"the body does not match {model.__name__}"):
            read(decode_envelope(encode_envelope("tokentok", body)))


class Aliased(pydantic.BaseModel):
    order: int = pydantic.Field(alias="orderId")


@pytest.mark.parametrize("body", [Aliased(orderId=42), {"orderId": 42}])
def test_a_pydantic_model_is_read_by_the_names_and_aliases_of_its_fields(body: Any) -> None:
    found = reader_for(Aliased)(decode_envelope(encode_envelope("tokentok", body)))
    assert found == Aliased(orderId=42)


def test_text_and_bytes_are_models_too() -> None:
    assert reader_for(str)(decode_envelope(encode_envelope("tokentok", "hello"))) == "hello"
    assert reader_for(bytes)(decode_envelope(encode_envelope("tokentok", b"\xff"))) == b"\xff"


def test_an_invalid_model_is_refused_at_registration() -> None:
    with pytest.raises(ConfigError, match="cannot be a model"):
        Consumer().on("orders", print, model=Order | DataOrder)


# Taking handlers


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 0},
        {"batch": True},
        {"within": "50ms"},
        {"batch": 5, "within": "soon"},
        {"timeout": "0"},
    ],
)
def test_invalid_handler_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="orders"):
        Consumer().on("orders", print, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"poll_batch_size": 0},
        {"poll_timeout": timedelta(0)},
        {"poll_timeout": timedelta(microseconds=999)},
        {"prefix": "{"},
        {"name": ""},
    ],
)
def test_invalid_consumer_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Consumer(**options)


def test_handlers_are_held_strongly_until_removed() -> None:
    handlers = Handlers()
    handlers.add("orders", lambda message: None)
    assert handlers.topics() == ["orders"]
    assert len(handlers.plan("orders").receivers) == 1
    assert handlers.plan("invoices").is_empty
    handlers.remove("orders")
    assert handlers.plan("orders").is_empty
    assert handlers.topics() == []


def test_on_is_a_decorator_and_a_call() -> None:
    consumer = Consumer()

    @consumer.on("orders")
    def first(message: Message) -> None: ...

    assert first.__name__ == "first"
    assert consumer.on("orders", first) is first


def test_the_shortest_timeout_counts() -> None:
    handlers = Handlers()
    handlers.add("orders", lambda message: None)
    assert handlers.plan("orders").timeout_s == 3600
    handlers.add("orders", lambda message: None, timeout="30s")
    handlers.add("orders", lambda message: None, timeout=timedelta(seconds=90))
    assert handlers.plan("orders").timeout_s == 30


# Settling


class Script:
    """A store with scripted answers."""

    def __init__(self, *answers: Any) -> None:
        self.answers = deque(answers)
        self.calls: list[Transition[Any]] = []

    def batch_size(self, topic: str, kind: type[Transition[Any]]) -> int:
        return 2

    def call(self, transition: Transition[Any]) -> Any:
        self.calls.append(transition)
        answer = self.answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run(self, transition: Transition[Any]) -> Flow[Any]:
        self.calls.append(transition)
        reply = yield Execute(("EVALSHA", "sha", 0))
        if reply[0] != b"OK":
            yield Execute(("HKEYS", "groups"))
        return transition.parse(reply[1:])


def settler_for(store: Script) -> tuple[Settler, Subscription, Signals]:
    sub = Subscription(cast("Any", store), Shard("orders"), "lisa", "me", slots=Slots(1))
    sub.membership.group = "lisa"
    signals = Signals()
    return Settler(lambda: [sub], SignalSender(signals, lambda result: None)), sub, signals


def test_acks_go_in_calls_of_the_batch_size_and_fire_after_the_answer() -> None:
    store = Script([Acked.ACKED, Acked.LATE], [Acked.STALE])
    settler, sub, signals = settler_for(store)
    acked = heard(signals.acked)
    finished(sub, "abc")
    assert not settler.flush()
    assert [len(cast("Ack", call).settlements) for call in store.calls] == [2, 1]
    assert [message.id for message in acked] == ["a", "b"]
    assert sub.leases.held == {}


def test_failed_calls_keep_their_order_and_are_retried() -> None:
    store = Script(ServerUnavailable("down"), [Acked.ACKED, Acked.ACKED])
    settler, sub, _ = settler_for(store)
    finished(sub, "ab")
    assert settler.flush()
    settler._pauses[sub] = (math.inf, Backoff())
    assert settler.flush()  # still pausing: not called
    assert len(store.calls) == 1
    assert len(sub.leases.held) == 2
    settler._pauses[sub] = (0.0, Backoff())
    assert not settler.flush()
    assert [one.id for one in cast("Ack", store.calls[1]).settlements] == ["a", "b"]


def finished(sub: Subscription, names: str) -> None:
    for name in names:
        sub.leases.held[f"{name}-1"] = one = held(name)
        sub.finish(one, None)


class Obliging(Script):
    """A store that takes every ack."""

    def call(self, transition: Transition[Any]) -> Any:
        self.calls.append(transition)
        return [Acked.ACKED] * len(cast("Ack", transition).settlements)


class Hanging(Obliging):
    """A store whose calls wait for `go_on`, then acknowledge or raise `says`."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.says: Exception | None = None

    def call(self, transition: Transition[Any]) -> Any:
        self.go_on.wait(10)
        if self.says is not None:
            raise self.says
        return super().call(transition)


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    store = Hanging()
    yield store
    store.go_on.set()


def settler_of_nodes(*stores: Script, has_nodes: bool = True) -> tuple[Settler, list[Subscription]]:
    subs = [
        Subscription(cast("Any", store), Shard("orders"), "lisa", "me", slots=Slots(1))
        for store in stores
    ]
    announcer = SignalSender(Signals(), lambda result: None)
    return Settler(lambda: subs, announcer, has_nodes=has_nodes), subs


def test_a_hanging_node_delays_no_other(hanging: Hanging) -> None:
    settler, (hung, well) = settler_of_nodes(hanging, Obliging())
    settler.start()
    for _ in range(2):
        finished(hung, "a")
        finished(well, "b")
        settler.notify(hung)
        settler.notify(well)
        wait_until(lambda: not well.leases.held)
    assert hung.leases.held
    assert not hanging.calls
    hanging.go_on.set()
    settler.close(10)
    assert not hung.leases.held


def test_a_call_that_hung_and_failed_is_retried(hanging: Hanging) -> None:
    hanging.says = ServerUnavailable("it hung")
    settler, (hung, _) = settler_of_nodes(hanging, Obliging())
    settler.start()
    finished(hung, "a")
    settler.notify(hung)
    hanging.go_on.set()
    wait_until(lambda: hung in settler._pauses)
    hanging.says = None
    wait_until(lambda: not hung.leases.held)
    settler.close(10)
    assert not settler._pauses


def test_deliveries_finished_during_a_flush_are_settled_next(hanging: Hanging) -> None:
    settler, (hung, _) = settler_of_nodes(hanging, Obliging())
    finished(hung, "a")
    assert settler.flush()
    finished(hung, "b")
    assert settler.flush()
    hanging.go_on.set()
    assert settler._pool.wait(10)
    assert not hung.leases.held
    settler._pool.close()


def test_close_waits_for_a_hanging_node_only_until_its_deadline(hanging: Hanging) -> None:
    settler, (hung, well) = settler_of_nodes(hanging, Obliging())
    settler.start()
    finished(hung, "a")
    finished(well, "b")
    began = time.monotonic()
    settler.close(0.2)
    assert time.monotonic() - began < 0.2 + CLOSING_S + 1
    assert hung.leases.held
    assert not well.leases.held


@pytest.mark.parametrize("has_nodes", [False, True])
def test_close_settles_deliveries_finished_during_the_last_flush(
    hanging: Hanging, *, has_nodes: bool
) -> None:
    settler, (early, hung) = settler_of_nodes(Obliging(), hanging, has_nodes=has_nodes)
    settler.start()
    finished(hung, "b")
    settler.notify(hung)
    settler.flush_now()
    wait_until(lambda: not hung.outcomes.acks)  # its call runs: the other one was checked before
    finished(early, "a")
    closing = threading.Thread(target=settler.close, args=(10,))
    closing.start()
    wait_until(lambda: settler._closes is not None)
    hanging.go_on.set()
    closing.join()
    assert not early.leases.held
    assert not hung.leases.held


def test_the_settler_ends_only_when_all_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    settler, (one, _) = settler_of_nodes(Obliging(), Obliging())
    monkeypatch.setattr(settler._pool, "start", lambda _, work: work())
    finished(one, "a")
    assert settler.flush(), "more may have been finished after its last look"
    assert not settler.flush()


def test_close_waits_for_calls_running_at_the_deadline(hanging: Hanging) -> None:
    settler, (one, other) = settler_of_nodes(hanging, hanging)
    settler.start()
    finished(one, "a")
    finished(other, "b")
    let_go = threading.Timer(0.2, hanging.go_on.set)
    let_go.start()
    settler.close(0)
    assert not one.leases.held
    assert not other.leases.held


def test_tasks_run_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool: KeyedPool[str] = KeyedPool("test")
    done: list[str] = []
    with monkeypatch.context() as refusing:
        refusing.setattr(threading.Thread, "start", refuse)
        pool.start("a", lambda: done.append(threading.current_thread().name))
        assert pool.wait(0)
    pool.start("a", lambda: done.append(threading.current_thread().name))
    assert pool.wait(10)
    assert done == [threading.current_thread().name, "test-1"]
    pool.close()


def test_a_few_acks_share_a_pipeline_with_a_read() -> None:
    store = Script()
    settler, sub, _ = settler_for(store)
    assert settler.acks_for_read(sub) is None  # nothing to settle
    finished(sub, "ab")
    along = settler.acks_for_read(sub)
    assert along is not None
    assert not settler.flush()
    assert [len(cast("Ack", call).settlements) for call in store.calls] == [2]
    assert len(sub.leases.held) == 2
    along.take([b"OK", b"al"])
    assert sub.leases.held == {}


@pytest.mark.parametrize(
    "reply", [redis.ConnectionError("cut"), redis.ResponseError("NOSCRIPT"), [b"GROUPS", b"new"]]
)
def test_acks_of_a_failed_read_return_to_the_settler_in_order(reply: Any) -> None:
    store = Script([Acked.REPEATED, Acked.ACKED], [Acked.ACKED])
    settler, sub, _ = settler_for(store)
    finished(sub, "ab")
    along = settler.acks_for_read(sub)
    assert along is not None
    finished(sub, "c")
    along.take(reply)
    assert len(sub.leases.held) == 3
    assert not settler.flush()
    assert [one.id for call in store.calls[1:] for one in cast("Ack", call).settlements] == [
        "a",
        "b",
        "c",
    ]
    assert sub.leases.held == {}


def test_a_pause_ends_with_acks_settled_by_a_read() -> None:
    settler, sub, _ = settler_for(Script(ServerUnavailable("down")))
    finished(sub, "a")
    assert settler.flush()
    along = settler.acks_for_read(sub)
    assert along is not None
    along.take([b"OK", b"a"])
    assert not settler.flush()
    assert settler._next_try_s() is None


def test_a_pause_ends_with_its_subscription() -> None:
    settler, sub, _ = settler_for(Script(ServerUnavailable("down")))
    finished(sub, "a")
    assert settler.flush()
    settler._subscriptions = list
    assert not settler.flush()
    assert settler._next_try_s() is None


def test_releasing_stops_at_the_first_call_without_a_reply() -> None:
    store = Script(ServerUnavailable("it hangs"))
    _, sub, _ = settler_for(store)
    assert not sub.releases.make([(name, f"{name}-1") for name in "abcdef"])
    assert len(store.calls) == 1


def test_many_acks_and_acks_with_receivers_do_not_go_with_a_read() -> None:
    settler, sub, signals = settler_for(Script())
    finished(sub, "abc")
    assert settler.acks_for_read(sub) is None
    sub.outcomes.acks.take()

    def hear(topic: str, *, message: Message) -> None: ...

    with signals.acked.connected_to(hear):
        assert settler.acks_for_read(sub) is None
    assert [one.message.id for one in sub.outcomes.acks.take_all()] == ["b", "c"]


class Contested(deque[Held]):
    """Acks whose first item another thread takes right after they are counted."""

    def __init__(self, acks: deque[Held], *, counted: int) -> None:
        super().__init__(acks)
        self.counted = counted
        self.taken: list[Held] = []

    def __len__(self) -> int:
        count = super().__len__()
        self.counted -= 1
        if self.counted == 0 and count:
            self.taken.append(self.popleft())
        return count


@pytest.mark.parametrize("names", ["a", "ab"])
@pytest.mark.parametrize("counted", [1, 2, 3])
@pytest.mark.parametrize("by_reader", [True, False])
def test_reader_and_settler_may_take_the_same_acks(
    names: str, counted: int, *, by_reader: bool
) -> None:
    store = Obliging()
    settler, sub, _ = settler_for(store)
    finished(sub, names)
    sub.outcomes.acks._items = acks = Contested(sub.outcomes.acks._items, counted=counted)
    if by_reader:
        along = settler.acks_for_read(sub)
        if along is not None:
            along.take([b"OK", b"a" * len(cast("Ack", store.calls[0]).settlements)])
    assert not settler.flush()
    settled = [one.id for call in store.calls for one in cast("Ack", call).settlements]
    left = [one.message.id for one in [*acks.taken, *acks]]
    assert sorted(settled + left) == list(names)
    assert sorted(one.message.id for one in sub.leases.held.values()) == sorted(left)


def test_settlements_for_a_removed_group_are_dropped() -> None:
    settler, sub, _ = settler_for(Script(GroupRemoved("gone")))
    finished(sub, "a")
    assert not settler.flush()
    assert sub.leases.held == {}


def test_failures_report_when_the_next_attempt_is_due() -> None:
    retrying, dead = Retried(Failed.RETRYING, 123, 1), Retried(Failed.DEAD, None, 3)
    settler, sub, signals = settler_for(Script([retrying, dead]))
    fired: list[tuple[str, str | None, int | None]] = []

    def hear(topic: str, *, message: Message) -> None:
        fired.append((message.id, message.reason, message.next_due_ms))

    signals.retrying.connect(hear)
    signals.dead.connect(hear)
    for name in "ab":
        sub.leases.held[f"{name}-1"] = one = held(name)
        sub.finish(one, Verdict("why"))
    settler.flush()
    assert fired == [("a", "why", 123), ("b", "why", None)]


def test_errors_of_signal_receivers_are_ignored() -> None:
    settler, sub, signals = settler_for(Script([Acked.ACKED, Acked.ACKED]))
    fired: list[str] = []

    def hear(topic: str, *, message: Message) -> None:
        fired.append(message.id)
        raise ValueError("too late to matter")

    signals.acked.connect(hear)
    for name in "ab":
        sub.finish(held(name), None)
    assert not settler.flush()
    assert fired == ["a", "b"]


def test_twenty_failures_in_a_row_degrade_until_one_success() -> None:
    _, sub, _ = settler_for(Script())
    for _ in range(19):
        sub.finish(held(), Verdict("why"))
    assert sub.state == "running"
    sub.finish(held(), Verdict("why"))
    assert sub.state == "degraded"
    sub.finish(held(), None)
    assert sub.state == "running"


def test_a_failed_batch_is_one_failure_in_a_row() -> None:
    _, sub, _ = settler_for(Script())
    deliveries = [held(str(n)) for n in range(100)]
    for _ in range(19):
        sub.finish_batch(deliveries, [Verdict("why")] * 100)
    assert sub.state == "running"
    sub.finish_batch(deliveries, [Verdict("why")] * 100)
    assert sub.state == "degraded"
    sub.finish_batch(deliveries, [None, *[Verdict("why")] * 99])
    assert sub.state == "running"
