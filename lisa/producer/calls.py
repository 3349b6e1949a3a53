"""Sends as script calls: bodies are encoded, get ids, and are split to fit one call each.

Messages are held in columns rather than rows; one object per message would dominate the cost.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections import Counter
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, NamedTuple, TypeVar

import msgspec

from lisa.core.model.envelope import (
    encode_head,
    encode_tail,
    encode_tails,
    new_id,
    new_ids,
    new_own_id,
    new_token,
)
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import COALESCED_IDS, check_own_id, keyed_id
from lisa.core.model.middleware import chain
from lisa.core.model.options import BYTES_PER_CALL
from lisa.core.model.sharding import KEY_END
from lisa.core.redis.flow import Flow, adrive, drive
from lisa.core.transitions.base import STEPS_PER_CALL
from lisa.core.transitions.coalesce import Coalesce, is_rule
from lisa.core.transitions.enqueue import Enqueue, OnDuplicate, SendOutcome, Sent
from lisa.producer.plan import NOW, Outgoing, SendOptions, SendPlan


class SendReport:
    """Counts outcomes and iterates them in the order of sending.

    Takes about 31 bytes per message with a generated id: the ids of one script call are one string,
    joined by line feeds (no id contains a control character) and split on demand.
    """

    __slots__ = ("_calls", "_counts")

    def __init__(self) -> None:
        self._calls: list[tuple[str, Sequence[Sent]]] = []
        self._counts: Counter[Sent] = Counter()

    def add(self, ids: Sequence[str], outcomes: Sequence[Sent]) -> None:
        """Add the messages of one script call."""
        self._calls.append(("\n".join(ids), outcomes))
        self._counts.update(outcomes)

    @property
    def accepted(self) -> int:
        """Number of new messages."""
        return self._counts[Sent.ACCEPTED]

    @property
    def duplicate(self) -> int:
        """Number of messages whose id was known; the earlier message is unchanged."""
        return self._counts[Sent.DUPLICATE]

    @property
    def replaced(self) -> int:
        """Number of messages that replaced an earlier one, which no consumer held."""
        return self._counts[Sent.REPLACED]

    @property
    def replaced_in_flight(self) -> int:
        """Number of messages that replaced one whose handler may be running, or may still start."""
        return self._counts[Sent.REPLACED_IN_FLIGHT]

    @property
    def updated(self) -> int:
        """Number of messages that took the place and the due time of an earlier one."""
        return self._counts[Sent.UPDATED]

    @property
    def rejected(self) -> int:
        """Number of messages whose id was known, with `on_duplicate="reject"`."""
        return self._counts[Sent.REJECTED]

    def __len__(self) -> int:
        return self._counts.total()

    def __iter__(self) -> Iterator[SendOutcome]:
        for ids, outcomes in self._calls:
            yield from map(SendOutcome, ids.split("\n"), outcomes)

    def __repr__(self) -> str:
        counts = " ".join(f"{name}={self._counts[name]}" for name in Sent)
        return f"<SendReport {counts}>"


T = TypeVar("T")

HIGH_COST = 2
"""Relative cost of a message whose id may be known, that may go straight to ready, or whose due
time differs from the others'. A new message for later that shares its due time costs 1."""

MOST = STEPS_PER_CALL // Enqueue.steps
"""Maximum number of new messages per call if all are due together later: no group is involved."""

REPLACE_COST = 4
"""Relative cost of a message that may replace another, which is removed from all its groups."""

_REPLACING = (OnDuplicate.REPLACE, OnDuplicate.UPDATE, OnDuplicate.KEEP_LIVE)


def check_iterable(value: object, what: str) -> None:
    """Reject strings, bytes and mappings, which are iterable but not meant as one.

    Raises InvalidMessage.
    """
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping)):
        raise InvalidMessage(f"{what} is an iterable, not a single {type(value).__name__}")


def pieces(source: Iterable[T]) -> Iterator[list[T]]:
    """Yield lists of at most MOST items, drawing from the source lazily."""
    rest = iter(source)
    while piece := list(islice(rest, MOST)):
        yield piece


async def async_pieces(source: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[list[T]]:
    """Yield lists of at most MOST items, also of an asynchronous source."""
    if not isinstance(source, AsyncIterable):
        for piece in pieces(source):
            yield piece
        return
    held: list[T] = []
    async for item in source:
        held.append(item)
        if len(held) >= MOST:
            yield held
            held = []
    if held:
        yield held


class Single(NamedTuple):
    """One encoded message. `id` is what follows the key, None if it is to be generated."""

    id: str | None
    due: str
    tail: bytes
    ttl_ms: int | None
    policy: str | None
    has_local: bool = False
    key: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Encoded:
    """Messages in columns, in the form that `Enqueue` and `Coalesce` take.

    A tail is an envelope without its head, which holds a send token.
    """

    ids: Sequence[str]
    dues: Sequence[str]
    tails: Sequence[bytes]
    ttls_ms: Sequence[int | None]
    policies: Sequence[str | None]
    are_ids_new: bool
    has_local: bool = False

    def cut(self, start: int, end: int) -> Encoded:
        """The messages from `start` to `end`."""
        part = slice(start, end)
        return Encoded(
            self.ids[part],
            self.dues if len(self.dues) == 1 else self.dues[part],
            self.tails[part],
            self.ttls_ms[part],
            self.policies[part],
            self.are_ids_new,
            self.has_local,
        )


def encode(plan: SendPlan, bodies: Sequence[Any]) -> Encoded:
    """Encode all bodies and assign ids. Raises InvalidMessage if any body is invalid."""
    if any(issubclass(kind, Outgoing) for kind in set(map(type, bodies))):
        return combine([single(plan, body) for body in bodies])
    n, tails = len(bodies), encode_tails(bodies, plan.headers)
    ttls_ms, policies = [plan.ttl_ms] * n, [plan.policy] * n
    own_id = _shared_id(plan)
    return Encoded(
        new_ids(n)
        if plan.key is None
        else [keyed_id(plan.key, own_id or new_own_id()) for _ in bodies],
        [plan.due],
        tails,
        ttls_ms,
        policies,
        are_ids_new=True,
        has_local=plan.is_by_calendar,
    )


def single(plan: SendPlan, body: Any) -> Single:
    """Encode one body, or one `Outgoing`. Raises InvalidMessage."""
    message_id = None
    if isinstance(body, Outgoing):
        plan = plan.with_differences(body)
        message_id = None if body.id is None else _checked_id(plan, body.id)
        body = body.body
    message_id = _shared_id(plan) or message_id
    tail = encode_tail(body, plan.headers)
    return Single(
        message_id, plan.due, tail, plan.ttl_ms, plan.policy, plan.is_by_calendar, plan.key
    )


def _checked_id(plan: SendPlan, message_id: str) -> str:
    if is_rule(plan.due):
        raise InvalidMessage("debounce, throttle and latest have an id of their own; leave out id")
    if plan.key is not None and message_id in COALESCED_IDS:
        raise InvalidMessage(f"id {message_id!r} is that of messages with debounce or the like")
    return check_own_id(message_id)


def _shared_id(plan: SendPlan) -> str | None:
    """The own id of a coalescing send until its script chooses; None for another send."""
    if not is_rule(plan.due):
        return None
    if plan.key is None:
        raise InvalidMessage(
            "debounce, throttle and latest need a key: the sends of one key are one"
        )
    return COALESCED_IDS[0]


def with_id(body: Any, message_id: str | None) -> Any:
    """The body of a `send`, in an `Outgoing` if it has an id. Raises InvalidMessage for another."""
    if isinstance(body, Outgoing):
        raise InvalidMessage("send takes the body itself; Outgoing is for send_many")
    return body if message_id is None else Outgoing(body, id=message_id)


def combine(messages: Sequence[Single]) -> Encoded:
    """Combine individually encoded messages; generates the missing ids."""
    own, dues, tails, ttls_ms, policies, local, keys = zip(*messages, strict=True)
    are_new = own.count(None) == len(own)
    if keys.count(None) == len(keys):
        made = new_ids(len(own))
        ids = made if are_new else [a or b for a, b in zip(own, made, strict=True)]
    else:
        ids = list(map(whole_id, own, keys))
    alike = dues.count(dues[0]) == len(dues)
    dues = dues[:1] if alike else dues
    return Encoded(ids, dues, tails, ttls_ms, policies, are_new, True in local)


def whole_id(own_id: str | None, key: str | None) -> str:
    """A message's id from its parts; generates the part after the key if it is None."""
    if key is None:
        return own_id or new_id()
    return keyed_id(key, own_id or new_own_id())


def calls(
    topic: str, on_duplicate: OnDuplicate, whole: Encoded, size: int, send_token: str | None = None
) -> Iterator[Enqueue | Coalesce]:
    """The script calls that send the messages, each with its own send token unless one is given.

    size: maximum cost per call, given the topic's groups. Each call also stays within the byte
    budget, so that no call blocks the server.
    """
    for run in _runs(whole):
        if is_rule(run.dues[0]):
            for part in parts(run, max(1, size // HIGH_COST)):
                yield coalesce(topic, part, send_token)
        else:
            yield from _enqueue_calls(topic, on_duplicate, run, size, send_token)


def _runs(whole: Encoded) -> Iterator[Encoded]:
    """The messages, split where coalescing sends and others meet."""
    start = 0
    for _, run in groupby(whole.dues, is_rule) if len(whole.dues) > 1 else [(False, whole.ids)]:
        end = start + len(list(run))
        yield whole.cut(start, end) if end - start < len(whole.ids) else whole
        start = end


def coalesce(topic: str, part: Encoded, send_token: str | None = None) -> Coalesce:
    """The call of coalescing sends. Its token is its own: derived from `send_token` if given."""
    n, token = len(part.ids), send_token or new_token()
    keys = [message_id.partition(KEY_END)[0] for message_id in part.ids]
    if send_token:
        seen = hashlib.blake2b("\n".join([send_token, *keys]).encode() + b"\n".join(part.tails))
        token = token[0] + base64.b64encode(seen.digest()[:6]).decode()[:7]
    head = encode_head(token)
    return Coalesce(
        topic,
        token,
        keys,
        part.dues if len(part.dues) == n else [*part.dues] * n,
        [head + tail for tail in part.tails],
        part.ttls_ms,
        part.policies,
        has_local=part.has_local,
        call_id=token,
    )


def _enqueue_calls(
    topic: str, on_duplicate: OnDuplicate, whole: Encoded, size: int, send_token: str | None
) -> Iterator[Enqueue]:
    each = cost(whole, on_duplicate)
    for part in parts(whole, MOST if each == 1 else max(1, size // each)):
        head = encode_head(send_token or new_token())
        yield Enqueue(
            topic,
            part.ids,
            part.dues,
            [head + tail for tail in part.tails],
            part.ttls_ms,
            part.policies,
            on_duplicate=on_duplicate,
            are_ids_new=part.are_ids_new,
            window="",
            has_local=part.has_local,
        )


def cost(whole: Encoded, on_duplicate: OnDuplicate) -> int:
    """Cost of one of these messages on the server, relative to the cheapest kind."""
    if not whole.are_ids_new:
        return REPLACE_COST if on_duplicate in _REPLACING else HIGH_COST
    due, *others = whole.dues
    is_past = due == NOW or (due[0] != "+" and int(due) <= time.time() * 1000)
    return HIGH_COST if others or is_past else 1


def fitting(lengths: Iterable[int], size: int = MOST) -> int:
    """Count the envelopes, from the first, that fit into one script call. Always at least one."""
    some = list(islice(lengths, size))
    if sum(some) <= BYTES_PER_CALL:
        return len(some)
    count = held = 0
    for length in some:
        held += length
        if count and held > BYTES_PER_CALL:
            break
        count += 1
    return count


def single_call(topic: str, on_duplicate: OnDuplicate, message: Single) -> Enqueue | Coalesce:
    """The script call that sends a single message."""
    if is_rule(message.due):
        return coalesce(topic, combine([message]))
    return Enqueue(
        topic,
        [whole_id(message.id, message.key)],
        [message.due],
        [encode_head(new_token()) + message.tail],
        [message.ttl_ms],
        [message.policy],
        on_duplicate=on_duplicate,
        are_ids_new=message.id is None,
        window="",
        has_local=message.has_local,
    )


def parts(whole: Encoded, size: int) -> Iterator[Encoded]:
    """The messages in parts of at most `size`, each within the byte budget of a call."""
    lengths = list(map(len, whole.tails))
    if len(lengths) <= size and sum(lengths) <= BYTES_PER_CALL:
        yield whole
        return
    start = 0
    while start < len(lengths):
        end = start + fitting(islice(lengths, start, None), size)
        yield whole.cut(start, end)
        start = end


class SendCall:
    """Messages that are being sent; middleware may change them.

    topic: the topic that they are sent to.
    messages: bodies, and `Outgoing` for those with options of their own.
    options: the options for all messages, see `SendOptions`.
    """

    __slots__ = ("messages", "options", "topic")

    def __init__(self, topic: str, messages: Sequence[Any], options: SendOptions) -> None:
        self.topic = topic
        self.messages = messages
        self.options = options.copy()

    def __len__(self) -> int:
        return len(self.messages)

    def __repr__(self) -> str:
        return f"<SendCall of {len(self)} on {self.topic!r}>"

    @property
    def bodies(self) -> list[Any]:
        """The bodies, in order. To replace them, assign the same number; else InvalidMessage."""
        return [
            message.body if isinstance(message, Outgoing) else message for message in self.messages
        ]

    @bodies.setter
    def bodies(self, bodies: Sequence[Any]) -> None:
        if len(bodies) != len(self):
            raise InvalidMessage(f"{len(bodies)} bodies cannot replace {len(self)}")
        self.messages = [
            msgspec.structs.replace(message, body=body) if isinstance(message, Outgoing) else body
            for message, body in zip(self.messages, bodies, strict=True)
        ]

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of all messages, except those with headers of their own."""
        return self.options.get("headers") or {}

    def set_header(self, name: str, value: str, *, replace: bool = True) -> None:
        """Set a header of every message; with `replace=False`, only where it is missing."""

        def changed(headers: Mapping[str, str]) -> Mapping[str, str]:
            return headers if name in headers and not replace else {**headers, name: value}

        self.options = {**self.options, "headers": changed(self.headers)}
        self.messages = [
            msgspec.structs.replace(message, headers=changed(message.headers))
            if isinstance(message, Outgoing) and isinstance(message.headers, Mapping)
            else message
            for message in self.messages
        ]


class ThroughMiddleware(NamedTuple):
    """A step of a flow: sends a call through the methods of middleware, the first outermost."""

    methods: Sequence[Callable[..., Any]]
    call: SendCall
    send: Callable[[SendCall], Flow[Sequence[SendOutcome]]]

    def run(self, link: Any) -> Any:
        """Run the chain, blocking."""
        return chain(self.methods, lambda call: drive(self.send(call), link))(self.call)

    def arun(self, link: Any) -> Any:
        """Run the chain in the current task."""
        return chain(self.methods, lambda call: adrive(self.send(call), link))(self.call)
