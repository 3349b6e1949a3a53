"""Settles the deliveries of clients by their receipts, with concurrent requests batched."""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from lisa.core.model.envelope import fence_of
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.keys import check_group, check_id, check_topic
from lisa.core.model.lateness import EARLY, FORMER, LETTERS, former, narrowed
from lisa.core.store.batcher import Batcher, Deadline
from lisa.core.store.store import AsyncStore
from lisa.core.transitions.ack import NO_LATENESS, Ack, Acked, Settlement
from lisa.core.transitions.base import ById
from lisa.core.transitions.inspect import Inspect, Inspection
from lisa.core.transitions.lease import Extend, Release
from lisa.core.transitions.retry import (
    Deferral,
    Fail,
    Failed,
    Failure,
    Postpone,
    Postponed,
    Retried,
)

T = TypeVar("T")

_LATENESS = frozenset((*LETTERS, *FORMER, EARLY, NO_LATENESS))

TRIES = 5
"""How many times a delivery is looked up by id while other consumers take it over."""


_Time = Annotated[int, Meta(ge=0, lt=1 << 53)]


class _Written(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    group: str
    consumer: str
    id: str
    entry: Annotated[str, Meta(pattern=r"^[0-9]+-[0-9]+\Z", max_length=41)]
    fence: Annotated[str, Meta(pattern=r"^[\x00-\x2b\x2d-\x7f]{9}\Z")]  # ASCII without commas
    due_ms: _Time
    attempt: Annotated[int, Meta(gt=0, lt=1 << 31)]
    lateness: str
    ack_timeout_ms: _Time | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Written)


class Receipt(NamedTuple):
    """A delivery's group, consumer and settlement.

    `ack_timeout_ms` is the pull's ack timeout, which extensions reuse; None for the topic's.
    """

    group: str
    consumer: str
    settlement: Settlement
    ack_timeout_ms: int | None = None


def encode_receipt(receipt: Receipt) -> str:
    """A receipt as URL-safe text; its form is that of 0.1.0, so gateways of both can read it."""
    settlement = receipt.settlement._replace(lateness=former(receipt.settlement.lateness))
    written = _Written(receipt.group, receipt.consumer, *settlement[:-1], receipt.ack_timeout_ms)
    return urlsafe_b64encode(_encoder.encode(written)).rstrip(b"=").decode("ascii")


def decode_receipt(text: str, now_us: int) -> Receipt:
    """Parse a receipt. Raises InvalidMessage if the text is not a valid receipt.

    Its lateness is at most the time since due. now_us: the server's time.
    """
    try:
        data = text.encode("ascii")
        written = _decoder.decode(urlsafe_b64decode(data + b"=" * (-len(data) % 4)))
        check_group(written.group)
        check_id(written.id)
        if written.lateness not in _LATENESS:
            raise InvalidMessage("invalid lateness")
        check_group(written.consumer)
    except (binascii.Error, ValueError, msgspec.DecodeError):
        raise InvalidMessage("the receipt is not valid; send it as the pull returned it") from None
    late = narrowed(written.lateness, now_us - written.due_ms * 1_000)
    settlement = Settlement(
        written.id, written.entry, written.fence, written.due_ms, written.attempt, *late
    )
    return Receipt(written.group, written.consumer, settlement, written.ack_timeout_ms)


class _Batch(NamedTuple):
    """A call to which items are added: its class and its other arguments."""

    kind: type[ById[Any]]
    topic: str
    others: tuple[tuple[str, Any], ...]


class ReceiptSettler:
    """Acks, retries, defers, extends and releases deliveries, by receipt or, for older APIs, by id.

    `deadline`: when the current request stops waiting, in the event loop's time; None: never.
    """

    def __init__(self, store: AsyncStore, deadline: Deadline | None = None) -> None:
        self._store = store
        self._batcher: Batcher[_Batch, Any, Any] = Batcher(self._send, self._count, deadline)

    async def _call(self, kind: type[ById[T]], topic: str, item: Any, **others: Any) -> T:
        """One item's result of a call whose other arguments are `topic` and `others`."""
        result: T = await self._batcher.call(_Batch(kind, topic, (*others.items(),)), item)
        return result

    async def _send(self, batch: _Batch, items: Sequence[Any], known: list[Any]) -> None:
        kind, topic, others = batch
        call: Any = kind  # its fields differ
        (column,) = kind.columns
        known += await self._store.call_by_id(call(topic, **dict(others), **{column: items}))

    def _count(self, batch: _Batch, items: Iterable[Any]) -> int:
        return sum(1 for _ in islice(items, self._store.batch_size(batch.topic, batch.kind)))

    async def ack(self, topic: str, receipt: Receipt) -> Acked:
        """Settle as handled; the outcome is acked, late, stale or repeated. Raises LisaError."""
        return await self._call(Ack, topic, receipt.settlement, group=receipt.group)

    async def retry(
        self, topic: str, receipt: Receipt, *, reason: str, delay: int | str | None = None
    ) -> Retried:
        """Settle as failed; `delay` in ms, None for the policy, or "discard". Raises LisaError."""
        wait: Any = delay
        failure = Failure.of(receipt.settlement, reason, wait)
        return await self._call(Fail, topic, failure, group=receipt.group)

    async def defer(
        self,
        topic: str,
        receipt: Receipt,
        *,
        delay_ms: int,
        reason: str,
        rests_lane: bool = False,
    ) -> Postponed:
        """Put a delivery off without counting an attempt; stale if not held. Raises LisaError.

        rests_lane: no other message with the same key is delivered to the group meanwhile.
        """
        held = receipt.settlement[:2]
        deferral = Deferral(*held, delay_ms, reason, rests_lane=rests_lane)
        return await self._call(Postpone, topic, deferral, group=receipt.group)

    async def extend(self, topic: str, receipt: Receipt, ack_timeout_ms: int | None = None) -> bool:
        """Restart the ack timeout; returns False for a stale delivery. Raises LisaError."""
        return await self._call(
            Extend,
            topic,
            receipt.settlement[:2],
            group=receipt.group,
            consumer=receipt.consumer,
            ack_timeout_ms=receipt.ack_timeout_ms if ack_timeout_ms is None else ack_timeout_ms,
        )

    async def release(self, topic: str, receipt: Receipt) -> bool:
        """Return a delivery without counting an attempt; False if stale. Raises LisaError."""
        return await self._call(Release, topic, receipt.settlement[:2], group=receipt.group)

    async def look(self, topic: str, message_id: str, *, bodies: bool = True) -> Inspection:
        """The state of a message in each group; changes nothing. Raises LisaError."""
        return await self._call(Inspect, check_topic(topic), check_id(message_id), bodies=bodies)

    async def holder(self, topic: str, message_id: str, group: str | None = None) -> Receipt | None:
        """The current delivery of a message, in the named group or the only one that holds it.

        None if it is not in flight. Raises ConfigError if several groups hold it.
        """
        seen = await self.look(topic, message_id, bodies=False)
        held = [
            state
            for state in seen.group_states
            if state.state == "in_flight" and state.group == (group or state.group)
        ]
        if len(held) > 1:
            names = ", ".join(state.group for state in held)
            raise ConfigError(f"message {message_id!r} is in flight in several groups: {names}")
        if not held:
            return None
        (state,) = held
        settlement = Settlement(
            message_id,
            state.entry or "",
            fence_of(seen.envelope),
            state.due_ms or 0,
            state.failed_attempts + 1,
        )
        return Receipt(state.group, state.consumer or "", settlement)

    async def ack_by_id(
        self, topic: str, message_id: str, group: str | None = None
    ) -> Acked | None:
        """Ack the current delivery of a message; None if it is not in flight."""
        for _ in range(TRIES):
            receipt = await self.holder(topic, message_id, group)
            if receipt is None:
                return None
            outcome = await self.ack(topic, receipt)
            if outcome is not Acked.STALE:
                return outcome
        return Acked.STALE

    async def retry_by_id(
        self,
        topic: str,
        message_id: str,
        *,
        reason: str,
        delay: int | str | None = None,
        group: str | None = None,
    ) -> Retried | None:
        """Settle the current delivery of a message as failed; None if it is not in flight."""
        for _ in range(TRIES):
            receipt = await self.holder(topic, message_id, group)
            if receipt is None:
                return None
            retried = await self.retry(topic, receipt, reason=reason, delay=delay)
            if retried.outcome is not Failed.STALE:
                return retried
        return retried

    async def finish(self) -> None:
        """Wait until all requested calls have been made."""
        await self._batcher.finish()
