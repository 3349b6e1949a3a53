"""Settles the deliveries of clients by their receipts, with concurrent requests batched."""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

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

_LATENESS = frozenset((*LETTERS, *FORMER, EARLY, NO_LATENESS))

TRIES = 5
"""How many times a delivery is looked up by id while other consumers take it over."""


class _Written(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    group: str
    consumer: str
    id: str
    entry: str
    fence: str
    due_ms: int
    attempt: int
    lateness: str
    ack_timeout_ms: int | None


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
        milliseconds, dash, sequence = written.entry.partition("-")
        whole = dash and milliseconds.isdigit() and sequence.isdigit() and written.entry.isascii()
        if not (
            whole
            and len(written.entry) <= 41
            and len(written.fence) == 9
            and written.fence.isascii()
        ):
            raise InvalidMessage("invalid entry or fence")
        if (
            "," in written.fence
            or written.lateness not in _LATENESS
            or not 0 < written.attempt < 1 << 31
        ):
            raise InvalidMessage("invalid attempt or lateness")
        if not 0 <= written.due_ms < 1 << 53 or not 0 <= (written.ack_timeout_ms or 0) < 1 << 53:
            raise InvalidMessage("invalid times")
        check_group(written.consumer)
    except (binascii.Error, ValueError, msgspec.DecodeError):
        raise InvalidMessage("the receipt is not valid; send it as the pull returned it") from None
    late = narrowed(written.lateness, now_us - written.due_ms * 1_000)
    settlement = Settlement(
        written.id, written.entry, written.fence, written.due_ms, written.attempt, *late
    )
    return Receipt(written.group, written.consumer, settlement, written.ack_timeout_ms)


class _Batch(NamedTuple):
    """The arguments that all items of one batch share."""

    topic: str
    group: str
    more: Any = None
    """The consumer and the ack timeout of an extension; whether bodies are read."""


_CALLS: dict[type[ById[Any]], Callable[[_Batch, Sequence[Any]], ById[Any]]] = {
    Ack: lambda batch, items: Ack(batch.topic, batch.group, items),
    Fail: lambda batch, items: Fail(batch.topic, batch.group, items),
    Postpone: lambda batch, items: Postpone(batch.topic, batch.group, items),
    Extend: lambda batch, items: Extend(
        batch.topic, batch.group, batch.more[0], items, batch.more[1]
    ),
    Release: lambda batch, items: Release(batch.topic, batch.group, items),
    Inspect: lambda batch, items: Inspect(batch.topic, items, bodies=batch.more),
}
"""How the items of a batch become one call."""


class ReceiptSettler:
    """Acks, retries, defers, extends and releases deliveries, by receipt or, for older APIs, by id.

    `deadline`: when the current request stops waiting, in the event loop's time; None: never.
    """

    def __init__(self, store: AsyncStore, deadline: Deadline | None = None) -> None:
        self._store = store
        self._batchers = {kind: self._batcher(kind, deadline) for kind in _CALLS}

    def _batcher(
        self, kind: type[ById[Any]], deadline: Deadline | None
    ) -> Batcher[_Batch, Any, Any]:
        async def work(batch: _Batch, items: Sequence[Any], known: list[Any]) -> None:
            known += await self._store.call_by_id(_CALLS[kind](batch, items))

        def count(batch: _Batch, items: Iterable[Any]) -> int:
            return sum(1 for _ in islice(items, self._store.batch_size(batch.topic, kind)))

        return Batcher(work, count, deadline)

    async def ack(self, topic: str, receipt: Receipt) -> Acked:
        """Settle as handled; the outcome is acked, late, stale or repeated. Raises LisaError."""
        batch = _Batch(topic, receipt.group)
        acked: Acked = await self._batchers[Ack].call(batch, receipt.settlement)
        return acked

    async def retry(
        self, topic: str, receipt: Receipt, *, reason: str, delay: int | str | None = None
    ) -> Retried:
        """Settle as failed; `delay` in ms, None for the policy, or "discard". Raises LisaError."""
        wait: Any = delay
        failure = Failure.of(receipt.settlement, reason, wait)
        retried: Retried = await self._batchers[Fail].call(_Batch(topic, receipt.group), failure)
        return retried

    async def defer(self, topic: str, receipt: Receipt, *, delay_ms: int, reason: str) -> Postponed:
        """Put a delivery off without counting an attempt; stale if not held. Raises LisaError."""
        held = receipt.settlement
        deferral = Deferral(held.id, held.entry, delay_ms, reason)
        batch = _Batch(topic, receipt.group)
        postponed: Postponed = await self._batchers[Postpone].call(batch, deferral)
        return postponed

    async def extend(self, topic: str, receipt: Receipt, ack_timeout_ms: int | None = None) -> bool:
        """Restart the ack timeout; returns False for a stale delivery. Raises LisaError."""
        timeout = receipt.ack_timeout_ms if ack_timeout_ms is None else ack_timeout_ms
        batch = _Batch(topic, receipt.group, (receipt.consumer, timeout))
        is_held: bool = await self._batchers[Extend].call(batch, receipt.settlement[:2])
        return is_held

    async def release(self, topic: str, receipt: Receipt) -> bool:
        """Return a delivery without counting an attempt; False if stale. Raises LisaError."""
        batch = _Batch(topic, receipt.group)
        was_held: bool = await self._batchers[Release].call(batch, receipt.settlement[:2])
        return was_held

    async def look(self, topic: str, message_id: str, *, bodies: bool = True) -> Inspection:
        """The state of a message in each group; changes nothing. Raises LisaError."""
        batch = _Batch(check_topic(topic), "", bodies)
        seen: Inspection = await self._batchers[Inspect].call(batch, check_id(message_id))
        return seen

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
        for batcher in self._batchers.values():
            await batcher.finish()
