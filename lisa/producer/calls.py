"""From bodies to script calls: encoded, given ids, cut to what one call may hold.

Messages stand in columns here, not in rows: an object for each would cost more than all the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from lisa.core.envelope import encode_head, encode_tail, encode_tails, new_id, new_ids, new_token
from lisa.core.errors import InvalidMessage
from lisa.core.keys import check_id
from lisa.core.transitions.enqueue import Enqueue, OnDuplicate
from lisa.producer.plan import NOW, Outgoing, Plan

__all__ = [
    "Encoded",
    "Single",
    "calls",
    "check_iterable",
    "encode",
    "fitting",
    "lone",
    "pieces",
    "single",
    "together",
]

T = TypeVar("T")

DEARER = 2
"""What a message costs against a new one for later that shares its due time with the others: one
whose id may be known, that may go straight to ready, or that has a due time of its own."""

REPLACING = 4
"""What a message costs that may replace another: that one is taken out of wherever it is."""

LARGEST_CALL_BYTES = 1 << 20
"""Envelopes of one script call, together, unless a single one is larger: it blocks the server."""


def check_iterable(value: object, what: str) -> None:
    """Refuse what can be iterated but was surely not meant so. Raises InvalidMessage."""
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping)):
        raise InvalidMessage(f"{what} is an iterable, not a single {type(value).__name__}")


def pieces(source: Iterable[T], size: Callable[[], int]) -> Iterator[list[T]]:
    """Lists of at most `size()` items, drawn, and the size asked for, as they are wanted."""
    rest = iter(source)
    while piece := list(islice(rest, size())):
        yield piece


class Single(NamedTuple):
    """One encoded message. `id` is None where one is to be made."""

    id: str | None
    due: str
    tail: bytes
    ttl_ms: int | None
    policy: str | None


@dataclass(frozen=True, slots=True)
class Encoded:
    """Messages by columns, as `Enqueue` takes them.

    A tail is an envelope without its head, which holds a send token.
    """

    ids: Sequence[str]
    dues: Sequence[str]
    tails: Sequence[bytes]
    ttls_ms: Sequence[int | None]
    policies: Sequence[str | None]
    are_ids_new: bool

    def cut(self, start: int, end: int) -> Encoded:
        """Some of them."""
        part = slice(start, end)
        return Encoded(
            self.ids[part], self.dues if len(self.dues) == 1 else self.dues[part],
            self.tails[part], self.ttls_ms[part], self.policies[part], self.are_ids_new,
        )  # fmt: skip


def encode(plan: Plan, bodies: Sequence[Any]) -> Encoded:
    """Encode bodies and give them ids, or refuse them all. Raises InvalidMessage."""
    if any(issubclass(kind, Outgoing) for kind in set(map(type, bodies))):
        return together([single(plan, body) for body in bodies])
    n, tails = len(bodies), encode_tails(bodies, plan.headers)
    ttls_ms, policies = [plan.ttl_ms] * n, [plan.policy] * n
    return Encoded(new_ids(n), [plan.due], tails, ttls_ms, policies, are_ids_new=True)


def single(plan: Plan, body: Any) -> Single:
    """Encode one body, or one `Outgoing`. Raises InvalidMessage."""
    message_id = None
    if isinstance(body, Outgoing):
        plan = plan.with_differences(body)
        message_id = None if body.id is None else check_id(body.id)
        body = body.body
    tail = encode_tail(body, plan.headers)
    return Single(message_id, plan.due, tail, plan.ttl_ms, plan.policy)


def together(messages: Sequence[Single]) -> Encoded:
    """Messages that were encoded one by one, ids given where there are none."""
    own, dues, tails, ttls_ms, policies = zip(*messages, strict=True)
    made = new_ids(len(own))
    are_new = own.count(None) == len(own)
    ids = made if are_new else [a or b for a, b in zip(own, made, strict=True)]
    alike = dues.count(dues[0]) == len(dues)
    return Encoded(ids, dues[:1] if alike else dues, tails, ttls_ms, policies, are_new)


def calls(topic: str, on_duplicate: OnDuplicate, whole: Encoded, size: int) -> Iterator[Enqueue]:
    """The script calls that send the messages, each with a send token of its own.

    One call holds at most `size` messages, and so many bytes that it does not block the server.
    """
    for part in _parts(whole, max(1, size // _cost(whole, on_duplicate))):
        token = new_token()
        head = encode_head(token)
        yield Enqueue(
            topic, token, part.ids, part.dues, [head + tail for tail in part.tails],
            part.ttls_ms, part.policies, on_duplicate, part.are_ids_new,
        )  # fmt: skip


def _cost(whole: Encoded, on_duplicate: OnDuplicate) -> int:
    """What one of these messages costs the server, against the cheapest."""
    if not whole.are_ids_new:
        return REPLACING if on_duplicate is OnDuplicate.REPLACE else DEARER
    due, *others = whole.dues
    is_past = due == NOW or (due[0] != "+" and int(due) <= time.time() * 1000)
    return DEARER if others or is_past else 1


def fitting(lengths: Iterable[int], size: int) -> int:
    """How many envelopes of these lengths, from the first on, one script call may hold."""
    count = held = 0
    for length in islice(lengths, size):
        held += length
        if count and held > LARGEST_CALL_BYTES:
            break
        count += 1
    return count


def lone(topic: str, on_duplicate: OnDuplicate, message: Single) -> Enqueue:
    """The script call that sends a single message."""
    token = new_token()
    message_id, due, tail, ttl_ms, policy = message
    return Enqueue(
        topic, token, [message_id or new_id()], [due], [encode_head(token) + tail],
        [ttl_ms], [policy], on_duplicate, message_id is None,
    )  # fmt: skip


def _parts(whole: Encoded, size: int) -> Iterator[Encoded]:
    lengths = list(map(len, whole.tails))
    if len(lengths) <= size and sum(lengths) <= LARGEST_CALL_BYTES:
        yield whole
        return
    start = 0
    while start < len(lengths):
        end = start + fitting(islice(lengths, start, None), size)
        yield whole.cut(start, end)
        start = end
