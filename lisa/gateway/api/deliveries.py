"""Handlers that pull messages and settle deliveries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import msgspec

from lisa.core.store.inspection import found
from lisa.core.transitions.ack import Acked
from lisa.core.transitions.retry import Failed
from lisa.gateway.access import Scope
from lisa.gateway.api.bodies import response_body
from lisa.gateway.api.messages import unknown
from lisa.gateway.api.models.base import NoFields
from lisa.gateway.api.models.deliveries import (
    AckAnswer,
    DeliveryAnswer,
    ExtendRequest,
    HeldAnswer,
    PullAnswer,
    PullRequest,
    ReceiptRequest,
    RetryAnswer,
    RetryRequest,
)
from lisa.gateway.api.operations import (
    MESSAGE,
    NO_GROUP,
    TOPIC,
    Call,
    HandlerType,
    Operations,
    Problems,
    Reply,
    answer,
    invalid,
)
from lisa.gateway.long_poll import hold
from lisa.gateway.problems import ErrorResponse
from lisa.gateway.pull_queue import HandedOut
from lisa.gateway.receipts import Receipt, decode_receipt

STALE: Problems = {
    404: "The message is unknown, or its group was removed.",
    409: "Nothing was changed, because the receipt is stale: the delivery was settled, or its ack "
    "timeout passed and the message was reclaimed. `state` is the message's current state.",
}

operations = Operations("Deliveries")

_encoder = msgspec.json.Encoder()


@operations.add(
    "pull",
    "POST",
    f"{TOPIC}/pull",
    scope=Scope.CONSUME,
    is_body_optional=True,
    answers={200: "The deliveries; may be empty."},
    problems=NO_GROUP,
)
async def pull(call: Call[NoFields, PullRequest]) -> Reply[PullAnswer]:
    """Pull due messages.

    Waits up to `wait_ms` for the first message. If the client disconnects, its messages are
    released without counting an attempt. Settle each delivery with its receipt, through any
    gateway.

    An unknown group is declared if the token has the scope `operate`; otherwise the response is
    404.
    """
    wanted = call.body
    work = call.hub.broker.pull(
        call.topic,
        group=wanted.group,
        most=wanted.max,
        wait_s=wanted.wait_ms / 1000,
        ack_timeout_ms=wanted.ack_timeout_ms,
        may_declare=call.token.allows(Scope.OPERATE, call.topic),
    )
    response = await hold(call.hub, call.request, work, _written)
    return cast("Reply[PullAnswer]", response)  # its content is that of _written


def _written(deliveries: Sequence[HandedOut]) -> bytes:
    return _encoder.encode(PullAnswer(deliveries=[_delivery(one) for one in deliveries]))


def _delivery(one: HandedOut) -> DeliveryAnswer:
    message = one.message
    body, base64 = response_body(message.body)
    return DeliveryAnswer(
        id=message.id,
        receipt=one.receipt_text,
        attempt=message.attempt,
        due_ms=message.due_ms,
        headers=message.headers,
        body=body,
        body_base64=base64,
    )


def _by_receipt(name: str, verb: str, done: str) -> Callable[[HandlerType], HandlerType]:
    """Declare an operation on a delivery, which the request identifies by its receipt."""
    return operations.add(
        name,
        "POST",
        f"{MESSAGE}/{verb}",
        scope=Scope.CONSUME,
        answers={200: done},
        problems=STALE,
    )


@_by_receipt("ackMessage", "ack", "Settled.")
async def ack(call: Call[NoFields, ReceiptRequest]) -> Reply[AckAnswer]:
    """Ack a delivery."""
    outcome = await call.hub.settler.ack(call.topic, _receipt(call))
    if outcome is Acked.STALE:
        raise await _stale(call)
    return answer(AckAnswer(id=call.id, outcome=outcome))


@_by_receipt("retryMessage", "retry", "The message will be retried, or is in garbage.")
async def retry(call: Call[NoFields, RetryRequest]) -> Reply[RetryAnswer]:
    """Retry or discard a failed delivery."""
    request, receipt = call.body, _receipt(call)
    if request.discard and request.delay_ms is not None:
        raise invalid("give either delay_ms or discard, not both")
    delay: int | Literal["discard"] | None = "discard" if request.discard else request.delay_ms
    retried = await call.hub.settler.retry(
        call.topic, receipt, reason=request.recorded_reason, delay=delay
    )
    if retried.outcome is Failed.STALE:
        raise await _stale(call)
    return answer(
        RetryAnswer(
            id=call.id,
            outcome=retried.outcome,
            due_ms=retried.due_ms,
            attempts=retried.failed_attempts,
        )
    )


@_by_receipt("extendMessage", "extend", "The ack timeout restarts.")
async def extend(call: Call[NoFields, ExtendRequest]) -> Reply[HeldAnswer]:
    """Extend a delivery's ack timeout."""
    receipt = _receipt(call)
    if not await call.hub.settler.extend(call.topic, receipt, call.body.ack_timeout_ms):
        raise await _stale(call, held=False)
    return answer(HeldAnswer(id=call.id, held=True))


@_by_receipt("releaseMessage", "release", "Released.")
async def release(call: Call[NoFields, ReceiptRequest]) -> Reply[HeldAnswer]:
    """Release a delivery.

    The message is redelivered immediately, without counting an attempt.
    """
    if not await call.hub.settler.release(call.topic, _receipt(call)):
        raise await _stale(call, held=False)
    return answer(HeldAnswer(id=call.id, held=True))


def _receipt(call: Call[NoFields, ReceiptRequest | RetryRequest | ExtendRequest]) -> Receipt:
    receipt = decode_receipt(call.body.receipt)
    if receipt.settlement.id != call.id:
        raise invalid(f"the receipt is for message {receipt.settlement.id!r}, not {call.id!r}")
    return receipt


async def _stale(
    call: Call[NoFields, ReceiptRequest | RetryRequest | ExtendRequest], **more: Any
) -> ErrorResponse:
    """The problem for a stale receipt, with the message's current state."""
    seen = await call.hub.settler.look(call.topic, call.id, bodies=False)
    now = found(call.topic, call.id, seen)
    if now is None:
        return unknown(call.topic, call.id)
    return ErrorResponse(
        409,
        "stale",
        f"the receipt of message {call.id!r} is stale: the message is now {now.state}",
        id=call.id,
        outcome="stale",
        state=now.state,
        **more,
    )
