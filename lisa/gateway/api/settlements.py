"""Settles one delivery for a request; the operations on one delivery and on many share this."""

from __future__ import annotations

from typing import Any, Literal

from lisa.core.store.inspection import found
from lisa.core.transitions.ack import Acked
from lisa.core.transitions.retry import Failed
from lisa.gateway.api.messages import unknown
from lisa.gateway.api.models.deliveries import (
    AckAnswer,
    DeferAnswer,
    DeferRequest,
    ExtendRequest,
    HeldAnswer,
    ReceiptRequest,
    RetryAnswer,
    RetryRequest,
)
from lisa.gateway.api.operations import invalid
from lisa.gateway.context import GatewayContext
from lisa.gateway.problems import ErrorResponse
from lisa.gateway.receipts import Receipt


async def ack(hub: GatewayContext, topic: str, _: ReceiptRequest, receipt: Receipt) -> AckAnswer:
    """Settle as handled. Raises ErrorResponse or LisaError, like the functions below."""
    outcome = await hub.settler.ack(topic, receipt)
    if outcome is Acked.STALE:
        raise await _stale(hub, topic, receipt)
    return AckAnswer(id=receipt.settlement.id, outcome=outcome)


async def retry(
    hub: GatewayContext, topic: str, request: RetryRequest, receipt: Receipt
) -> RetryAnswer:
    """Settle as failed, or discard."""
    if request.discard and request.delay_ms is not None:
        raise invalid("give either delay_ms or discard, not both")
    delay: int | Literal["discard"] | None = "discard" if request.discard else request.delay_ms
    retried = await hub.settler.retry(topic, receipt, reason=request.recorded_reason, delay=delay)
    if retried.outcome is Failed.STALE:
        raise await _stale(hub, topic, receipt)
    return RetryAnswer(
        id=receipt.settlement.id,
        outcome=retried.outcome,
        due_ms=retried.due_ms,
        attempts=retried.failed_attempts,
    )


async def defer(
    hub: GatewayContext, topic: str, request: DeferRequest, receipt: Receipt
) -> DeferAnswer:
    """Put off without counting an attempt."""
    said = await hub.settler.defer(
        topic, receipt, delay_ms=request.delay_ms, reason=request.recorded_reason
    )
    if said.due_ms is None:
        raise await _stale(hub, topic, receipt)
    return DeferAnswer(id=receipt.settlement.id, outcome=said.outcome, due_ms=said.due_ms)


async def extend(
    hub: GatewayContext, topic: str, request: ExtendRequest, receipt: Receipt
) -> HeldAnswer:
    """Restart the ack timeout."""
    if not await hub.settler.extend(topic, receipt, request.ack_timeout_ms):
        raise await _stale(hub, topic, receipt, held=False)
    return HeldAnswer(id=receipt.settlement.id, held=True)


async def release(
    hub: GatewayContext, topic: str, _: ReceiptRequest, receipt: Receipt
) -> HeldAnswer:
    """Return the message without counting an attempt."""
    if not await hub.settler.release(topic, receipt):
        raise await _stale(hub, topic, receipt, held=False)
    return HeldAnswer(id=receipt.settlement.id, held=True)


async def _stale(hub: GatewayContext, topic: str, receipt: Receipt, **more: Any) -> ErrorResponse:
    """The problem for a stale receipt, with the message's current state."""
    message_id = receipt.settlement.id
    seen = await hub.settler.look(topic, message_id, bodies=False)
    now = found(topic, message_id, seen)
    if now is None:
        return await unknown(hub, topic, message_id)
    return ErrorResponse(
        409,
        "stale",
        f"the receipt of message {message_id!r} is stale: the message is now {now.state}",
        id=message_id,
        outcome="stale",
        state=now.state,
        **more,
    )
