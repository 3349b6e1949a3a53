"""Pulling messages, and saying what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from lisa.core.transitions.ack import Acked
from lisa.core.transitions.retry import Failed
from lisa.gateway.holding import hold
from lisa.gateway.native.bodies import written_body
from lisa.gateway.native.messages import unknown
from lisa.gateway.native.models import (
    AckAnswer,
    DeliveryAnswer,
    ExtendRequest,
    HeldAnswer,
    NoFields,
    PullAnswer,
    PullRequest,
    ReceiptRequest,
    RetryAnswer,
    RetryRequest,
)
from lisa.gateway.native.operations import Call, answer, invalid
from lisa.gateway.problems import Problem
from lisa.gateway.receipts import Receipt, decode_receipt
from lisa.gateway.waiting import Delivery
from lisa.producer.found import found

__all__ = ["ack", "extend", "pull", "release", "retry"]

_encoder = msgspec.json.Encoder()


async def pull(call: Call[NoFields, PullRequest]) -> Response:
    """Take messages that are due, or wait for them."""
    wanted = call.body
    work = call.hub.room.pull(
        call.topic, group=wanted.group, most=wanted.max, wait_s=wanted.wait_ms / 1000,
        ack_timeout_ms=wanted.ack_timeout_ms,
    )  # fmt: skip
    return await hold(call.hub, call.request, work, _written)


def _written(deliveries: Sequence[Delivery]) -> bytes:
    return _encoder.encode(PullAnswer(deliveries=[_delivery(one) for one in deliveries]))


def _delivery(one: Delivery) -> DeliveryAnswer:
    message = one.message
    body, base64 = written_body(message.body)
    return DeliveryAnswer(
        id=message.id, receipt=one.receipt_text, attempt=message.attempt, due_ms=message.due_ms,
        headers=message.headers, body=body, body_base64=base64,
    )  # fmt: skip


async def ack(call: Call[NoFields, ReceiptRequest]) -> Response:
    """A delivery is handled."""
    outcome = await call.hub.settler.ack(call.topic, _receipt(call))
    if outcome is Acked.STALE:
        raise await _stale(call)
    return answer(AckAnswer(id=call.id, outcome=outcome))


async def retry(call: Call[NoFields, RetryRequest]) -> Response:
    """A delivery failed, or is given up."""
    request, receipt = call.body, _receipt(call)
    if request.discard and request.delay_ms is not None:
        raise invalid("give one of delay_ms and discard; what is discarded is not tried again")
    delay: int | Literal["discard"] | None = "discard" if request.discard else request.delay_ms
    retried = await call.hub.settler.retry(call.topic, receipt, reason=request.said, delay=delay)
    if retried.outcome is Failed.STALE:
        raise await _stale(call)
    return answer(
        RetryAnswer(id=call.id, outcome=retried.outcome, due_ms=retried.due_ms,
                    attempts=retried.failed_attempts)
    )  # fmt: skip


async def extend(call: Call[NoFields, ExtendRequest]) -> Response:
    """A delivery takes longer: its ack timeout begins anew."""
    receipt = _receipt(call)
    if not await call.hub.settler.extend(call.topic, receipt, call.body.ack_timeout_ms):
        raise await _stale(call, held=False)
    return answer(HeldAnswer(id=call.id, held=True))


async def release(call: Call[NoFields, ReceiptRequest]) -> Response:
    """A delivery goes back unhandled, no attempt counted."""
    if not await call.hub.settler.release(call.topic, _receipt(call)):
        raise await _stale(call, held=False)
    return answer(HeldAnswer(id=call.id, held=True))


def _receipt(call: Call[NoFields, ReceiptRequest | RetryRequest | ExtendRequest]) -> Receipt:
    receipt = decode_receipt(call.body.receipt)
    if receipt.settlement.id != call.id:
        raise invalid(f"this is the receipt of message {receipt.settlement.id!r}, not {call.id!r}")
    return receipt


async def _stale(
    call: Call[NoFields, ReceiptRequest | RetryRequest | ExtendRequest], **more: Any
) -> Problem:
    """Nothing was changed: what happened to the message instead."""
    seen = await call.hub.settler.look(call.topic, call.id, bodies=False)
    now = found(call.topic, call.id, seen)
    if now is None:
        return unknown(call.topic, call.id)
    return Problem(
        409, "stale",
        f"message {call.id!r} is no longer held by this receipt: it is {now.state} now",
        id=call.id, outcome="stale", state=now.state, **more,
    )  # fmt: skip
