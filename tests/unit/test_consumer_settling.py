"""The consumer's typed bodies, handlers and settler, without a server."""

from __future__ import annotations

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
from lisa.consumer.abreast import Abreast
from lisa.consumer.handlers import Handlers
from lisa.consumer.held import Held, Verdict
from lisa.consumer.models import Misfit, reader_for
from lisa.consumer.settler import CLOSING_S, Settler
from lisa.consumer.signalling import Announcer
from lisa.consumer.subscription import Subscription
from lisa.core.envelope import decode_envelope, encode_envelope
from lisa.core.errors import ConfigError, GroupRemoved, ServerUnavailable
from lisa.core.flow import Execute
from lisa.core.message import Message
from lisa.core.signals import Signals
from lisa.core.transitions.ack import Ack, Acked
from lisa.core.transitions.retry import Failed, Retried
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lisa.core.flow import Flow
    from lisa.core.transitions.base import Transition
    from tests.servers import Processes


def held(name: str = "a", body: object = None) -> Held:
    message = Message(id=name, topic="orders", group="lisa", body=body, due_ms=0)
    return Held(f"{name}-1", message, encode_envelope("tokentok", body), 0, 0.0, 9e9)


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
def test_a_body_becomes_its_model_or_is_refused(model: Any) -> None:
    read = reader_for(model)
    found = read(decode_envelope(encode_envelope("tokentok", {"order": 42})))
    assert (found["order"] if isinstance(found, dict) else found.order) == 42
    for body in ({"order": "x"}, {"other": 1}, [1], "text", b"\xff"):
        with pytest.raises(Misfit, match=f"the body is no {model.__name__}"):
            read(decode_envelope(encode_envelope("tokentok", body)))


def test_text_and_bytes_are_models_too() -> None:
    assert reader_for(str)(decode_envelope(encode_envelope("tokentok", "hello"))) == "hello"
    assert reader_for(bytes)(decode_envelope(encode_envelope("tokentok", b"\xff"))) == b"\xff"


def test_what_cannot_be_a_model_is_refused_when_the_handler_is_taken() -> None:
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
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="orders"):
        Consumer().on("orders", print, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"poll_batch_size": 0},
        {"poll_timeout": timedelta(0)},
        {"prefix": "{"},
        {"name": ""},
    ],
)
def test_a_consumer_refuses_what_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Consumer(**options)


def test_handlers_are_held_strongly_and_let_go() -> None:
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
    """A store whose calls answer what a test wrote down."""

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
    sub = Subscription(cast("Any", store), "orders", "lisa", "me")
    sub.group = "lisa"
    signals = Signals()
    return Settler(lambda: [sub], Announcer(signals, lambda result: None)), sub, signals


def test_acks_go_in_calls_of_the_batch_size_and_fire_after_the_answer() -> None:
    store = Script([Acked.ACKED, Acked.LATE], [Acked.STALE])
    settler, sub, signals = settler_for(store)
    fired: list[str] = []

    def hear(topic: str, *, message: Message) -> None:
        fired.append(message.id)

    signals.acked.connect(hear)
    for name in "abc":
        sub.held[f"{name}-1"] = one = held(name)
        sub.finish(one, None)
    assert not settler.flush()
    assert [len(cast("Ack", call).settlements) for call in store.calls] == [2, 1]
    assert fired == ["a", "b"]
    assert sub.held == {}


def test_what_the_server_does_not_take_is_kept_in_order_and_tried_again() -> None:
    store = Script(ServerUnavailable("down"), [Acked.ACKED, Acked.ACKED])
    settler, sub, _ = settler_for(store)
    for name in "ab":
        sub.held[f"{name}-1"] = one = held(name)
        sub.finish(one, None)
    assert settler.flush()
    assert settler.flush()  # its pause is not over: not even asked
    assert len(store.calls) == 1
    assert len(sub.held) == 2
    settler._pauses[sub] = (0.0, 0.1)
    assert not settler.flush()
    assert [one.id for one in cast("Ack", store.calls[1]).settlements] == ["a", "b"]


def finished(sub: Subscription, names: str) -> None:
    for name in names:
        sub.held[f"{name}-1"] = one = held(name)
        sub.finish(one, None)


class Obliging(Script):
    """A store that takes every ack."""

    def call(self, transition: Transition[Any]) -> Any:
        self.calls.append(transition)
        return [Acked.ACKED] * len(cast("Ack", transition).settlements)


class Hanging(Obliging):
    """A store that answers once it is told to, and then as it is told to."""

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
    subs = [Subscription(cast("Any", store), "orders", "lisa", "me") for store in stores]
    announcer = Announcer(Signals(), lambda result: None)
    return Settler(lambda: subs, announcer, has_nodes=has_nodes), subs


def test_a_node_that_hangs_holds_up_no_other(hanging: Hanging) -> None:
    settler, (hung, well) = settler_of_nodes(hanging, Obliging())
    settler.start()
    for _ in range(2):
        finished(hung, "a")
        finished(well, "b")
        settler.ring()
        wait_until(lambda: not well.held)
    assert hung.held
    assert not hanging.calls
    hanging.go_on.set()
    settler.close(10)
    assert not hung.held


def test_what_hung_and_failed_is_tried_again(hanging: Hanging) -> None:
    hanging.says = ServerUnavailable("it hung")
    settler, (hung, _) = settler_of_nodes(hanging, Obliging())
    settler.start()
    finished(hung, "a")
    settler.ring()
    hanging.go_on.set()
    wait_until(lambda: hung in settler._pauses)
    hanging.says = None
    wait_until(lambda: not hung.held)
    settler.close(10)
    assert not settler._pauses


def test_what_is_finished_meanwhile_is_settled_next(hanging: Hanging) -> None:
    settler, (hung, _) = settler_of_nodes(hanging, Obliging())
    finished(hung, "a")
    assert settler.flush()
    finished(hung, "b")
    assert settler.flush()
    hanging.go_on.set()
    assert settler._abreast.wait(10)
    assert not hung.held
    settler._abreast.close()


def test_closing_waits_for_a_node_that_hangs_for_its_time_only(hanging: Hanging) -> None:
    settler, (hung, well) = settler_of_nodes(hanging, Obliging())
    settler.start()
    finished(hung, "a")
    finished(well, "b")
    began = time.monotonic()
    settler.close(0.2)
    assert time.monotonic() - began < 0.2 + CLOSING_S + 1
    assert hung.held
    assert not well.held


@pytest.mark.parametrize("has_nodes", [False, True])
def test_what_is_finished_while_another_topic_is_settled_is_settled_before_the_end(
    hanging: Hanging, *, has_nodes: bool
) -> None:
    settler, (early, hung) = settler_of_nodes(Obliging(), hanging, has_nodes=has_nodes)
    settler.start()
    finished(hung, "b")
    settler.ring()
    settler.hurry()
    wait_until(lambda: not hung.acks)  # its call runs: the other was looked at before
    finished(early, "a")
    closing = threading.Thread(target=settler.close, args=(10,))
    closing.start()
    wait_until(lambda: settler._closes is not None)
    hanging.go_on.set()
    closing.join()
    assert not early.held
    assert not hung.held


def test_only_a_look_that_finds_all_idle_ends_the_settler(monkeypatch: pytest.MonkeyPatch) -> None:
    settler, (one, _) = settler_of_nodes(Obliging(), Obliging())
    monkeypatch.setattr(settler._abreast, "start", lambda _, work: work())
    finished(one, "a")
    assert settler.flush(), "more may have been finished after its last look"
    assert not settler.flush()


def test_calls_that_run_when_the_time_to_close_is_up_are_waited_for(hanging: Hanging) -> None:
    settler, (one, other) = settler_of_nodes(hanging, hanging)
    settler.start()
    finished(one, "a")
    finished(other, "b")
    let_go = threading.Timer(0.2, hanging.go_on.set)
    let_go.start()
    settler.close(0)
    assert not one.held
    assert not other.held


def test_work_is_done_where_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    abreast: Abreast[str] = Abreast("test")
    done: list[str] = []
    with monkeypatch.context() as refusing:
        refusing.setattr(threading.Thread, "start", refuse)
        abreast.start("a", lambda: done.append(threading.current_thread().name))
        assert abreast.wait(0)
    abreast.start("a", lambda: done.append(threading.current_thread().name))
    assert abreast.wait(10)
    assert done == [threading.current_thread().name, "test-1"]
    abreast.close()


def test_a_few_acks_go_along_with_a_read_and_count_once_it_is_answered() -> None:
    store = Script()
    settler, sub, _ = settler_for(store)
    assert settler.along(sub) is None  # nothing to settle
    finished(sub, "ab")
    along = settler.along(sub)
    assert along is not None
    assert not settler.flush()
    assert [len(cast("Ack", call).settlements) for call in store.calls] == [2]
    assert len(sub.held) == 2
    along.take([b"OK", b"al"])
    assert sub.held == {}


@pytest.mark.parametrize(
    "reply", [redis.ConnectionError("cut"), redis.ResponseError("NOSCRIPT"), [b"GROUPS", b"new"]]
)
def test_acks_that_were_not_simply_taken_come_back_to_the_settler_in_order(reply: Any) -> None:
    store = Script([Acked.REPEATED, Acked.ACKED], [Acked.ACKED])
    settler, sub, _ = settler_for(store)
    finished(sub, "ab")
    along = settler.along(sub)
    assert along is not None
    finished(sub, "c")
    along.take(reply)
    assert len(sub.held) == 3
    assert not settler.flush()
    assert [one.id for call in store.calls[1:] for one in cast("Ack", call).settlements] == [
        "a",
        "b",
        "c",
    ]
    assert sub.held == {}


def test_a_pause_ends_with_acks_that_went_along_with_a_read() -> None:
    settler, sub, _ = settler_for(Script(ServerUnavailable("down")))
    finished(sub, "a")
    assert settler.flush()
    along = settler.along(sub)
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


def test_giving_back_ends_at_the_first_call_without_an_answer() -> None:
    store = Script(ServerUnavailable("it hangs"))
    _, sub, _ = settler_for(store)
    assert not sub.release([(name, f"{name}-1") for name in "abcdef"])
    assert len(store.calls) == 1


def test_many_acks_and_those_that_somebody_listens_for_are_the_settlers_own() -> None:
    settler, sub, signals = settler_for(Script())
    finished(sub, "abc")
    assert settler.along(sub) is None
    sub.acks.pop()

    def hear(topic: str, *, message: Message) -> None: ...

    with signals.acked.connected_to(hear):
        assert settler.along(sub) is None
    assert [one.message.id for one in sub.acks] == ["a", "b"]


class Contested(deque[Held]):
    """Acks of which another thread takes the first just after somebody counted them."""

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
    sub.acks = acks = Contested(sub.acks, counted=counted)
    if by_reader:
        along = settler.along(sub)
        if along is not None:
            along.take([b"OK", b"a" * len(cast("Ack", store.calls[0]).settlements)])
    assert not settler.flush()
    settled = [one.id for call in store.calls for one in cast("Ack", call).settlements]
    left = [one.message.id for one in [*acks.taken, *acks]]
    assert sorted(settled + left) == list(names)
    assert sorted(one.message.id for one in sub.held.values()) == sorted(left)


def test_settlements_for_a_removed_group_are_dropped() -> None:
    settler, sub, _ = settler_for(Script(GroupRemoved("gone")))
    sub.held["a-1"] = one = held("a")
    sub.finish(one, None)
    assert not settler.flush()
    assert sub.held == {}


def test_failures_tell_when_the_next_attempt_is_due() -> None:
    retrying, dead = Retried(Failed.RETRYING, 123, 1), Retried(Failed.DEAD, None, 3)
    settler, sub, signals = settler_for(Script([retrying, dead]))
    fired: list[tuple[str, str | None, int | None]] = []

    def hear(topic: str, *, message: Message) -> None:
        fired.append((message.id, message.reason, message.next_due_ms))

    signals.retrying.connect(hear)
    signals.dead.connect(hear)
    for name in "ab":
        sub.held[f"{name}-1"] = one = held(name)
        sub.finish(one, Verdict("why"))
    settler.flush()
    assert fired == [("a", "why", 123), ("b", "why", None)]


def test_a_receiver_that_raises_after_settling_stops_nobody() -> None:
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


def test_twenty_failures_in_a_row_degrade_and_one_success_heals() -> None:
    _, sub, _ = settler_for(Script())
    for _ in range(19):
        sub.finish(held(), Verdict("why"))
    assert sub.state == "running"
    sub.finish(held(), Verdict("why"))
    assert sub.state == "degraded"
    sub.finish(held(), None)
    assert sub.state == "running"


def test_help_is_quick(processes: Processes) -> None:
    help_text = processes.start("-X", "importtime", "-m", "lisa.cli.consumer", "--help")
    assert help_text.wait() == 0
    assert "TARGET" in help_text.output
    imported = {line.rpartition("|")[2].strip() for line in help_text.output.splitlines()}
    assert not imported & {"redis", "pydantic", "lisa.consumer", "apscheduler"}


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
