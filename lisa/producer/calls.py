"""From bodies to script calls: encoded, given ids, cut to what one call may hold.

Messages stand in columns here, not in rows: an object for each would cost more than all the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from lisa.core.envelope import encode_head, encode_tail, new_ids, new_token
from lisa.core.errors import InvalidMessage
from lisa.core.keys import check_id
from lisa.core.transitions.enqueue import Enqueue, items
from lisa.producer.plan import Outgoing, Plan

__all__ = ["Encoded", "calls", "check_iterable", "encode", "pieces"]

T = TypeVar("T")

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


@dataclass(frozen=True, slots=True)
class Encoded:
    """Messages by columns. A tail is an envelope without its head, which holds a send token."""

    ids: Sequence[str]
    dues: Sequence[str]
    tails: Sequence[bytes]
    ttls_ms: Sequence[int | None]
    policies: Sequence[str | None]

    def cut(self, start: int, end: int) -> Encoded:
        """Some of them."""
        part = slice(start, end)
        return Encoded(
            self.ids[part], self.dues[part], self.tails[part], self.ttls_ms[part],
            self.policies[part],
        )  # fmt: skip


def encode(plan: Plan, bodies: Sequence[Any]) -> Encoded:
    """Encode bodies and give them ids, or refuse them all. Raises InvalidMessage."""
    n, ids = len(bodies), new_ids(len(bodies))
    differing = {at: body for at, body in enumerate(bodies) if isinstance(body, Outgoing)}
    if not differing:
        tails = [encode_tail(body, plan.headers) for body in bodies]
        return Encoded(ids, [plan.due] * n, tails, [plan.ttl_ms] * n, [plan.policy] * n)
    plans, tails = [plan] * n, []
    for at, body in enumerate(bodies):
        message = differing.get(at)
        if message is None:
            tails.append(encode_tail(body, plan.headers))
            continue
        plans[at] = plan.with_differences(message)
        tails.append(encode_tail(message.body, plans[at].headers))
        if message.id is not None:
            ids[at] = check_id(message.id)
    return Encoded(
        ids, [one.due for one in plans], tails,
        [one.ttl_ms for one in plans], [one.policy for one in plans],
    )  # fmt: skip


def calls(topic: str, plan: Plan, messages: Encoded, size: int) -> Iterator[Enqueue]:
    """The script calls that send the messages, each with a send token of its own.

    One call holds at most `size` messages, and so many bytes that it does not block the server.
    """
    for part in _parts(messages, size):
        token = new_token()
        head = encode_head(token)
        envelopes = [head + tail for tail in part.tails]
        whole = items(part.ids, part.dues, envelopes, part.ttls_ms, part.policies)
        yield Enqueue(topic, token, whole, plan.on_duplicate)


def _parts(messages: Encoded, size: int) -> Iterator[Encoded]:
    lengths = list(map(len, messages.tails))
    if len(lengths) <= size and sum(lengths) <= LARGEST_CALL_BYTES:
        yield messages
        return
    start = held = 0
    for at, length in enumerate(lengths):
        held += length
        if at > start and (at - start == size or held > LARGEST_CALL_BYTES):
            yield messages.cut(start, at)
            start, held = at, length
    yield messages.cut(start, len(lengths))
