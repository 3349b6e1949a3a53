"""What a producer is given to send: options, due times, bodies, and the calls made of them.

All of it is checked before any server call.
"""

import asyncio
import json
import math
import re
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pydantic
import pytest
from markupsafe import Markup

from lisa import AsyncProducer, Consumer, Retry, RetryPolicy
from lisa.core.model import envelope as envelopes
from lisa.core.model.clock import MAX_DUE_MS, OLDEST_DUE_MS
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.keys import check_group, check_id, check_topic
from lisa.core.model.lanes import cost_and_slack
from lisa.core.model.options import BYTES_PER_CALL, LARGEST_BODY_BYTES
from lisa.core.store.batcher import Batcher
from lisa.core.transitions.coalesce import Coalesce
from lisa.core.transitions.enqueue import Enqueue, Sent
from lisa.producer import OnDuplicate, Outgoing, Producer, SendOutcome, SendReport
from lisa.producer.calls import MOST, calls, encode
from lisa.producer.plan import SendOptions, SendPlan

NOWHERE = "redis://127.0.0.1:1/0"
HOUR = timedelta(hours=1)
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
NAIVE = NOON.replace(tzinfo=None)
NOON_MS = 1_893_499_200_000


def plan(**options: Any) -> SendPlan:
    return SendPlan.of(cast("SendOptions", options), None)


def made(bodies: list[Any], size: int = 500, **options: Any) -> list[Enqueue]:
    of_call = plan(**options)
    found = list(calls("orders", of_call.on_duplicate, encode(of_call, bodies), size))
    return [call for call in found if isinstance(call, Enqueue)]


def test_due() -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "+0"),
        ({"delay": timedelta(minutes=30)}, "+1800000"),
        ({"delay": timedelta(milliseconds=2, microseconds=1)}, "+3"),
        ({"at_ms": MAX_DUE_MS}, str(MAX_DUE_MS)),
        ({"at": NOON + timedelta(microseconds=1)}, str(NOON_MS + 1)),
        ({"at": NAIVE, "tz": "+08:00"}, str(NOON_MS - 28_800_000)),
        ({"at": NAIVE, "tz": ZoneInfo("Asia/Tokyo")}, str(NOON_MS - 32_400_000)),
    )
    for options, due in cases:
        assert plan(**options).due == due


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"delay": timedelta(microseconds=-1)}, "negative"),
        ({"delay": timedelta.max}, "9999"),
        ({"delay": math.nan}, "not a duration"),
        ({"at_ms": math.nan}, "integer"),
        ({"at_ms": 1e12}, "integer"),
        ({"at_ms": True}, "integer"),
        ({"at_ms": "1893499200000"}, "integer"),
        ({"at": NAIVE}, "zone"),
        ({"at": date(2030, 1, 1)}, "datetime"),
        ({"at": NOON_MS}, "at_ms"),
        ({"at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-8)))}, "9999"),
        ({"at": datetime(9999, 12, 31, 23, 59), "tz": "America/New_York"}, "9999"),  # noqa: DTZ001  the zone is beside it
        ({"at": NOON, "tz": "Mars/Olympus"}, "Mars/Olympus"),
        ({"delay": timedelta(1), "at_ms": 1}, "contradict"),
        ({"at": NOON, "at_ms": 1}, "contradict"),
        ({"ttl": timedelta(0)}, "ttl"),
        ({"retry": "soon"}, "soon"),
        ({"retry": [timedelta(seconds=-1)]}, "negative"),
        ({"retry": timedelta(1)}, "policy"),
        ({"headers": {"a": 1}}, "text"),
        ({"headers": [("a", "b")]}, "mapping"),
        ({"headers": {"a": "x" * 70_000}}, "65535"),
        ({"headers": {"a": "\ud800"}}, "headers"),
        ({"cost": 0}, "cost is a whole number from 1 to 1,000, not 0"),
        ({"cost": 1_001}, "not 1001"),
        ({"cost": True}, "not True"),
        ({"cost": 1.5}, "not 1.5"),
        ({"slack": "31d"}, "slack is at most 30d, not 31d"),
        ({"on_duplicate": "overwrite"}, "keep, keep_live, replace, update, reject"),
    ],
)
def test_refusals(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidMessage, match=said):
        plan(**options)


OPTIONS: dict[str, Callable[[Any], Any]] = {
    "grace": lambda value: Consumer(NOWHERE, grace=value)._options.grace,
    "poll_timeout": lambda value: Consumer(NOWHERE, poll_timeout=value)._options.poll_timeout,
    "patience": lambda value: Producer(NOWHERE, patience=value)._patience,
    "async patience": lambda value: AsyncProducer(NOWHERE, patience=value)._patience,
}
PARAMETERS: dict[str, Callable[[Any], Any]] = {
    "delay": lambda value: plan(delay=value).due,
    "ttl": lambda value: plan(ttl=value).ttl_ms,
    "slack": lambda value: plan(slack=value).policy,
    "outgoing slack": lambda value: plan().with_differences(Outgoing(1, slack=value)).policy,
    "outgoing delay": lambda value: plan().with_differences(Outgoing(1, delay=value)).due,
    "outgoing ttl": lambda value: plan().with_differences(Outgoing(1, ttl=value)).ttl_ms,
    "Retry": lambda value: Retry(delay=value).delay,
    "fixed delay": lambda value: RetryPolicy.fixed(delay=value),
    "initial": lambda value: RetryPolicy.exponential(initial=value),
    "cap": lambda value: RetryPolicy.exponential(initial=timedelta(seconds=1), cap=value),
}


@pytest.mark.parametrize("name", [*OPTIONS, *PARAMETERS])
def test_every_duration_is_a_timedelta_or_text_with_a_unit(name: str) -> None:
    use = (OPTIONS | PARAMETERS)[name]
    assert use("90s") == use("1m30s") == use(timedelta(seconds=90)) != use("2m")
    kind = ConfigError if name in OPTIONS else InvalidMessage
    for wrong in (10, 1.5, "10", "soon", "-1s", timedelta(seconds=-1)):
        with pytest.raises(kind, match=f"^{name.rpartition(' ')[2].replace('Retry', 'delay')}: "):
            use(wrong)


def test_durations_of_a_pull_are_checked_before_a_server_is_asked() -> None:
    for name in ("wait", "ack_timeout"):
        with Consumer(NOWHERE) as consumer, pytest.raises(InvalidMessage, match=f"^{name}: "):
            consumer.pull("orders", **{name: 5})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^grace: 10 has no unit; write '10ms' or '10s'$"):
        OPTIONS["grace"](10)


def test_cost_and_slack_leave_the_other_policies_as_they_are() -> None:
    late = "skip after 10m"
    for given, stored in (
        ({"cost": 5}, "*;;5,"),
        ({"slack": 0}, "*;;,0"),
        ({"cost": 1000, "slack": "30d", "retry": []}, ";;1000,2592000000"),
        ({"cost": 5, "slack": "1s", "retry": "0,2m", "late": late}, "0,120000;600000,skip;5,1000"),
    ):
        assert plan(**given).policy == stored
        assert plan().with_differences(Outgoing(1, **given)).policy == stored
    call = plan(cost=5, late=late)
    assert call.with_differences(Outgoing(1)).policy == "*;600000,skip;5,"
    assert call.with_differences(Outgoing(1, cost=7)).policy == "*;600000,skip;7,"
    assert call.with_differences(Outgoing(1, slack="1s")).policy == "*;600000,skip;5,1000"
    assert call.with_differences(Outgoing(1, retry="0", late="run")).policy == "0;0,run;5,"
    assert cost_and_slack("5,") == (5, None)
    assert cost_and_slack(",0,17") == (None, timedelta(0))
    assert cost_and_slack(None) == (None, None)


def test_retry_and_ttl_which_outgoing_messages_inherit() -> None:
    for retry, policy in (
        (None, None),
        ([], ""),
        ("0,0,2m", "0,0,120000"),
        ([timedelta(0), timedelta(minutes=2)], "0,120000"),
        (RetryPolicy.fixed(delay=timedelta(seconds=1), count=2), "1000,1000"),
    ):
        assert plan(retry=retry).policy == policy
    assert plan(ttl=timedelta(microseconds=1)).ttl_ms == 1
    assert plan(ttl=timedelta.max).ttl_ms == MAX_DUE_MS
    call = plan(delay=timedelta(1), ttl=timedelta(2), retry="1s", headers={"a": "b"})
    assert call.with_differences(Outgoing("body")) == call
    different = Outgoing("body", at_ms=NOON_MS, ttl=timedelta(seconds=1), retry=[], headers={})
    own = call.with_differences(different)
    assert (own.due, own.ttl_ms, own.policy, own.headers) == (str(NOON_MS), 1_000, "", b"0000")
    assert own.on_duplicate is OnDuplicate.KEEP


def test_names_contain_no_key_separators() -> None:
    for check in (check_topic, check_group):
        for name in ("a|b", "a}b", "{a", "a\nb"):
            with pytest.raises(InvalidMessage, match="is not allowed"):
                check(name)


@pytest.mark.parametrize("topic", ["", "a b", "t{1}", "x" * 129, "é", None, 7, ["orders"]])
def test_bad_topics_are_refused(topic: Any) -> None:
    producer = Producer(NOWHERE)
    for call in (
        *(producer.cancel, producer.fire_now, producer.get, producer.send),
        lambda name, body: producer.send_many(name, [body]),
        lambda name, body: producer.send_stream(name, [body]),
        lambda name, _: producer.reschedule(name, "x", delay=timedelta(1)),
    ):
        with pytest.raises(InvalidMessage, match="topic"):
            call(topic, "x")


class Model(pydantic.BaseModel):
    order: Any


class Attrs:
    """As the library attrs makes them."""

    __attrs_attrs__ = (SimpleNamespace(name="order"),)

    def __init__(self, order: Any) -> None:
        self.order = order


class Level(Enum):
    LOW = "low"
    NONE = math.nan


class Money(int):
    pass


DATA = make_dataclass("Data", ["order"])
ID = UUID("a" * 32)
RECURSIVE: list[Any] = []
RECURSIVE.append(RECURSIVE)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        *((body, "body") for body in (math.nan, {"a": [math.inf]}, {"a": object()}, RECURSIVE)),
        ({"a": [Level.NONE]}, "NaN"),
        ({"a": Attrs(math.nan)}, "NaN"),
        *((body, "body") for body in ("\ud800", {1j: 2}, b"x" * (LARGEST_BODY_BYTES + 1))),
        *(
            ({"a": [{key: 1}]}, rf"the key {re.escape(repr(key))} is not text; quote it")
            for key in (True, None, (1, 2))
        ),
        *(
            (body, re.escape(f"two keys {path!r}, {keys}"))
            for body, path, keys in (
                ({1: "a", "1": "b"}, "1", "1 and '1'"),
                ({"a": [{}, {"b": {"2.5": 0, 2.5: 0}}]}, "a[1].b.2.5", "'2.5' and 2.5"),
                ([{NOON: 0, f"{NOON:%FT%TZ}": 0}], "[0].2030-01-01T12:00:00Z", f"{NOON!r} and "),
                ({Level.LOW: 0, "low": 0}, "low", "<Level.LOW: 'low'> and 'low'"),
                ({"a": {"low": 0, Level.LOW: 0}}, "a.low", "'low' and <Level.LOW: 'low'>"),
                ([{b"abc": 0, "YWJj": 0}], "[0].YWJj", "b'abc' and 'YWJj'"),
                ([{ID: 0, str(ID): 0}], f"[0].{ID}", f"{ID!r} and "),
                (
                    Model(order={Level.LOW: 0, "low": 0}),
                    "order.low",
                    "<Level.LOW: 'low'> and 'low'",
                ),
                (DATA({-1: 0, "-1": 0}), "order.-1", "-1 and '-1'"),
                (Model(order={1: 0, "1": 0}), "order.1", "1 and '1'"),
            )
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_bad_bodies_are_refused(body: Any, said: str) -> None:
    with pytest.raises(InvalidMessage, match=said) as alone:
        Producer(NOWHERE).send("orders", body)
    with pytest.raises(InvalidMessage, match=said) as among:
        envelopes.encode_tails([body, body], b"0000")
    assert str(among.value) == str(alone.value)


def test_mistakes_of_a_call() -> None:
    producer = Producer(NOWHERE)
    bodies: Any
    for bodies in ("text", b"bytes", {"order": 1}):
        for call in (producer.send_many, producer.cancel_many, producer.send_stream):
            with pytest.raises(InvalidMessage, match="iterable"):
                call("orders", bodies)
    with pytest.raises(TypeError, match="dely"):
        plan(dely=timedelta(1))
    with pytest.raises(InvalidMessage, match="send_many"):
        producer.send("orders", Outgoing("x"))
    with pytest.raises(InvalidMessage, match="fire_now"):
        producer.reschedule("orders", "a")
    with pytest.raises(ConfigError, match="patience"):
        Producer(NOWHERE, patience=None)  # type: ignore[arg-type]


MODELS = (msgspec.defstruct("Struct", [("order", int)]), DATA, Model)


class Number(IntEnum):
    X = 1


class Text(str, Enum):  # noqa: UP042 - as many programs have them
    """Of the kind whose members are formatted with their names."""

    ORDERS = "orders"


def test_subclasses_of_plain_types_are_plain_values() -> None:
    """As json.dumps writes them; in bodies, headers, ids and names."""
    values = {"a": [Markup("<b>"), np.float64(1.5), Money(5), Text.ORDERS, Number.X]}
    bodies = ((values, values), ({Money(5): Markup("x")}, {"5": "x"}), (Money(5), 5))
    for body, read in bodies:
        assert envelopes.encode_body(body)[1] == envelopes.encode_body(read)[1]
        assert msgspec.json.decode(envelopes.encode_body(body)[1]) == json.loads(json.dumps(body))
    assert envelopes.encode_body(Markup("<b>")) == (b"s", b"<b>")
    with pytest.raises(InvalidMessage, match="NaN"):
        envelopes.encode_body({"a": np.float64("nan")})
    headers = {Markup("a"): Markup("b"), Text.ORDERS: Text.ORDERS, "c": "d"}
    plain = {"a": "b", "orders": "orders", "c": "d"}
    assert envelopes.encode_headers(headers) == envelopes.encode_headers(plain)
    with pytest.raises(InvalidMessage, match="headers are text to text"):
        envelopes.encode_headers({"a": np.float64(1)})  # type: ignore[dict-item]
    for check in (check_topic, check_group, check_id):
        assert type(check(Text.ORDERS)) is str
        assert f"{check(Text.ORDERS)}" == "orders"


def test_bodies_survive_a_round_trip_alone_and_among_others() -> None:
    bodies: list[tuple[Any, Any]] = [
        ([1, 2.5, "é", None], [1, 2.5, "é", None]),
        ("text é", "text é"),
        (b"\x00\xff", b"\x00\xff"),
        (bytearray(b"ab"), b"ab"),
        (memoryview(b"ab"), b"ab"),
        *((model(order=42), {"order": 42}) for model in MODELS),
    ]
    for body, read in bodies:
        (call,) = made([body, Outgoing(body)], headers={"k": "v"})
        for envelope in call.envelopes:
            parts = envelopes.decode_envelope(envelope)
            assert envelopes.decode_body(parts.kind, parts.body) == read
            assert parts.headers == {"k": "v"}
    headers = envelopes.encode_headers({"k": "v"})
    for several in ([b"a", b""], ["é", ""], [{"n": 1}, {"n": None}], ["a", b"a"]):
        assert envelopes.encode_tails(several, headers) == [
            envelopes.encode_tail(body, headers) for body in several
        ]


def test_the_sizes_of_calls() -> None:
    def sizes(bodies: list[Any], **options: Any) -> list[int]:
        parts = made(bodies, 8, **options)
        tokens = [
            {envelopes.decode_envelope(one).token for one in call.envelopes} for call in parts
        ]
        assert len(set().union(*tokens)) == sum(map(len, tokens)) == len(parts)
        return [len(call.ids) for call in parts]

    assert sizes([1] * 8, delay=HOUR) == [8]
    assert sizes([1] * 8, at_ms=4_000_000_000_000) == [8]
    assert sizes([1] * 8) == [4] * 2, "straight to ready"
    assert sizes([1] * 8, at_ms=OLDEST_DUE_MS) == [4] * 2, "straight to ready"
    own = [Outgoing(1, at_ms=OLDEST_DUE_MS + n) for n in range(8)]
    assert sizes(own) == [4] * 2, "a due time each"
    known = [Outgoing(1, id=str(n)) for n in range(8)]
    assert sizes(known, delay=HOUR) == [4] * 2, "may be known"
    assert sizes(known, delay=HOUR, on_duplicate="replace") == [2] * 4, "may replace others"
    later = made(list(range(2 * MOST + 1)), size=1, delay=HOUR)
    assert [len(call.ids) for call in later] == [MOST, MOST, 1], "concern no group yet"
    large, small = b"x" * (BYTES_PER_CALL + 1), b"x" * (BYTES_PER_CALL // 3)
    assert sizes([small, small, small, large, small, b""], delay=HOUR) == [2, 1, 1, 2], "by bytes"


def test_ids_made_together_are_distinct_valid_and_in_order_with_all_others() -> None:
    made_ids: list[str] = []
    for count in (500, 1, 4096, 0):
        made_ids += [*envelopes.new_ids(count), envelopes.new_id()]
    assert made_ids == sorted(set(made_ids))
    assert all(check_id(one) == one and len(one) == 22 for one in made_ids)
    assert not any(one.startswith("-") for one in made_ids), "would be an option of a command"


def test_a_report_counts_iterates_and_takes_few_bytes_a_message() -> None:
    report = SendReport()
    assert not report
    report.add(["a", "b"], [Sent.ACCEPTED, Sent.DUPLICATE])
    report.add(["c", "d"], [Sent.REPLACED, Sent.REJECTED])
    counts = (report.accepted, report.duplicate, report.replaced, report.rejected, len(report))
    assert counts == (1, 1, 1, 1, 4)
    assert list(report)[1:3] == [SendOutcome("b", Sent.DUPLICATE), SendOutcome("c", Sent.REPLACED)]
    assert "accepted=1 duplicate=1" in repr(report)
    tracemalloc.start()
    for _ in range(100):
        report.add(envelopes.new_ids(500), [Sent.ACCEPTED] * 500)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken / len(report) < 40


# Batches of concurrent calls


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
async def test_concurrent_calls_are_answered_together_where_tasks_start_eagerly() -> None:
    sizes = []

    async def work(_: str, items: Sequence[int], results: list[int | None]) -> None:
        sizes.append(len(items))
        await asyncio.sleep(0)
        results.extend(items)

    asyncio.get_running_loop().set_task_factory(getattr(asyncio, "eager_task_factory"))  # noqa: B009
    batcher = Batcher(work, lambda _, items: len(list(items)))
    assert await batcher.call("orders", 0) == 0
    assert await asyncio.gather(*(batcher.call("orders", n) for n in range(5))) == list(range(5))
    assert sizes == [1, 5]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"debounce": "5s", "throttle": "5s"}, "give one of debounce and throttle"),
        ({"throttle": "5s", "latest": True}, "give one of throttle and latest"),
        ({"max_wait": "5s"}, "max_wait limits a debounce"),
        ({"throttle": "5s", "max_wait": "5s"}, "max_wait limits a debounce"),
        ({"debounce": "5s", "max_wait": "4s"}, "max_wait 4s is shorter than debounce 5s"),
        ({"debounce": "0s"}, "debounce must exceed 0"),
        ({"throttle": timedelta(0)}, "throttle must exceed 0"),
        ({"debounce": timedelta(days=9_999_999)}, "ends beyond the year 9999"),
        ({"debounce": 5}, "debounce"),
        ({"latest": "yes"}, "latest is True or False"),
        ({"debounce": "5s", "on_duplicate": "keep"}, "leave out on_duplicate"),
        ({"latest": True, "on_duplicate": "update"}, "leave out on_duplicate"),
        ({"debounce": "5s", "delay": "1s"}, "leave out delay"),
        ({"debounce": "5s", "at": NOON}, "leave out at"),
        ({"throttle": "5s", "at_ms": NOON_MS}, "leave out at_ms"),
        ({"throttle": "5s", "at_local": "2030-01-01T12:00", "tz": "UTC"}, "leave out at_local"),
    ],
)
def test_options_that_contradict_a_coalescing_send(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidMessage, match=why):
        plan(key="k", **options)
    if "on_duplicate" not in options:
        with pytest.raises(InvalidMessage, match=why):
            encode(plan(), [Outgoing("x", key="k", **options)])


@pytest.mark.parametrize("options", [{"debounce": "5s"}, {"throttle": "5s"}, {"latest": True}])
def test_a_coalescing_send_needs_a_key_and_no_id(options: dict[str, Any]) -> None:
    of_call = plan(**options)
    for bodies in (["x"], [Outgoing("x")]):
        with pytest.raises(InvalidMessage, match="need a key"):
            encode(of_call, bodies)
    with pytest.raises(InvalidMessage, match="leave out id"):
        encode(of_call, [Outgoing("x", key="k", id="a")])
    with pytest.raises(InvalidMessage, match="'~1' is that of messages with debounce"):
        encode(plan(key="k"), [Outgoing("x", id="~1")])
    assert encode(plan(), [Outgoing("x", id="~1")]).ids == ["~1"]


def test_rules_of_coalescing_sends() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"debounce": "5s"}, "d5000,"),
        ({"debounce": timedelta(microseconds=1), "max_wait": "1m"}, "d1,60000"),
        ({"throttle": "1.5s"}, "t1500"),
        ({"latest": True}, "l+0"),
        ({"latest": True, "delay": "5s"}, "l+5000"),
        ({"latest": True, "at": NOON}, f"l{NOON_MS}"),
        ({"latest": False, "delay": "5s"}, "+5000"),
        ({"debounce": "5s", "window": "0-24"}, "d5000,"),
    ]
    for options, rule in cases:
        assert plan(key="k", **options).due == rule
        found = encode(plan(throttle="9s"), [Outgoing("x", key="k", **options)])
        assert list(found.dues) == [rule]
    windowed = encode(plan(debounce="5s"), [Outgoing("x", key="k", window="9-17")])
    assert list(windowed.dues) == ["d5000,"]
    pairs: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"debounce": "5s"}, {"delay": "1s"}),
        ({"delay": "1s"}, {"debounce": "5s"}),
    )
    for given, own in pairs:
        (due,) = encode(plan(**given), [Outgoing("x", key="k", **own)]).dues
        assert due == ("d5000," if "debounce" in own else "+1000")
    delayed = encode(plan(latest=True), [Outgoing("x", key="k", delay="1s")])
    assert list(delayed.dues) == ["l+1000"]


def test_coalescing_sends_have_calls_of_their_own() -> None:
    bodies = [Outgoing("x", key="a", debounce="1s"), Outgoing("y", key="a", latest=True), "z"]
    bodies += [Outgoing("x", key=f"k{n}", throttle="1s") for n in range(300)]
    of_call = plan()
    found = list(calls("orders", of_call.on_duplicate, encode(of_call, bodies), 500))
    first, second, *others = found
    assert isinstance(first, Coalesce)
    assert (first.keys, list(first.rules)) == (["a", "a"], ["d1000,", "l+0"])
    assert isinstance(second, Enqueue)
    assert [len(call.message_ids) for call in others] == [250, 50]
    assert len({call.call_id for call in found if isinstance(call, Coalesce)}) == 3


def test_calls_with_one_send_token_are_told_by_what_they_send() -> None:
    def call(*bodies: str) -> Coalesce:
        whole = encode(plan(key="k", debounce="1s"), bodies)
        (found,) = calls("orders", OnDuplicate.KEEP, whole, 500, "~bcdefgh")
        assert isinstance(found, Coalesce)
        assert (len(found.token), found.token[0], found.call_id) == (8, "~", found.token)
        return found

    assert call("x").token == call("x").token
    assert call("x").token != call("y").token
