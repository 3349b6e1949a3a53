"""Handlers that pull messages and settle deliveries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import msgspec

from lisa.core.model.errors import ServerUnavailable
from lisa.gateway.access import Scope
from lisa.gateway.api import settlements
from lisa.gateway.api.bodies import response_body
from lisa.gateway.api.models.base import Answer, NoFields
from lisa.gateway.api.models.deliveries import (
    AckAnswer,
    DeferAnswer,
    DeferBatch,
    DeferRequest,
    DeliveryAnswer,
    ExtendBatch,
    ExtendRequest,
    HeldAnswer,
    PullAnswer,
    PullRequest,
    ReceiptBatch,
    ReceiptRequest,
    RetryAnswer,
    RetryBatch,
    RetryRequest,
    SettledBatch,
    SettledDelivery,
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
    problem_answer,
)
from lisa.gateway.context import GatewayContext, gather_parts
from lisa.gateway.long_poll import hold
from lisa.gateway.receipts import Receipt, decode_receipt
from lisa.gateway.waiter import HandedOut

S = TypeVar("S", ReceiptRequest, RetryRequest, DeferRequest, ExtendRequest)

STALE: Problems = {
    404: "The message or the topic is unknown, or the group was removed.",
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
    return DeliveryAnswer(
        id=message.id,
        receipt=one.receipt_text,
        attempt=message.attempt,
        due_ms=message.due_ms,
        headers=message.headers,
        **response_body(message.body),
    )


def _on_one(name: str, verb: str, done: str) -> Callable[[HandlerType], HandlerType]:
    """Declare an operation on one delivery."""
    return operations.add(
        name,
        "POST",
        f"{MESSAGE}/{verb}",
        scope=Scope.CONSUME,
        answers={200: done},
        problems=STALE,
    )


@_on_one("ackMessage", "ack", "Settled.")
async def ack(call: Call[NoFields, ReceiptRequest]) -> Reply[AckAnswer]:
    """Ack a delivery."""
    return answer(await settlements.ack(call.hub, call.topic, call.body, _receipt(call)))


@_on_one("retryMessage", "retry", "The message will be retried, or is in garbage.")
async def retry(call: Call[NoFields, RetryRequest]) -> Reply[RetryAnswer]:
    """Retry or discard a failed delivery."""
    return answer(await settlements.retry(call.hub, call.topic, call.body, _receipt(call)))


@_on_one("deferMessage", "defer", "Deferred.")
async def defer(call: Call[NoFields, DeferRequest]) -> Reply[DeferAnswer]:
    """Defer a delivery that cannot be handled now.

    The message is redelivered after the delay, without counting an attempt.
    """
    return answer(await settlements.defer(call.hub, call.topic, call.body, _receipt(call)))


@_on_one("extendMessage", "extend", "The ack timeout restarts.")
async def extend(call: Call[NoFields, ExtendRequest]) -> Reply[HeldAnswer]:
    """Extend a delivery's ack timeout."""
    return answer(await settlements.extend(call.hub, call.topic, call.body, _receipt(call)))


@_on_one("releaseMessage", "release", "Released.")
async def release(call: Call[NoFields, ReceiptRequest]) -> Reply[HeldAnswer]:
    """Release a delivery.

    The message is redelivered immediately, without counting an attempt.
    """
    return answer(await settlements.release(call.hub, call.topic, call.body, _receipt(call)))


def _receipt(call: Call[NoFields, Any]) -> Receipt:
    receipt = decode_receipt(call.body.receipt, call.hub.clock.about_us())
    if receipt.settlement.id != call.id:
        raise invalid(f"the receipt is for message {receipt.settlement.id!r}, not {call.id!r}")
    return receipt


def _on_many(name: str, verb: str) -> Callable[[HandlerType], HandlerType]:
    """Declare an operation on a batch of deliveries."""
    return operations.add(
        name,
        "POST",
        f"{TOPIC}/messages:batch-{verb}",
        scope=Scope.CONSUME,
        answers={200: "The result of each delivery, even if some failed."},
    )


@_on_many("ackMessages", "ack")
async def ack_batch(call: Call[NoFields, ReceiptBatch]) -> Reply[SettledBatch]:
    """Ack many deliveries.

    Each delivery has its own result, in request order: the fields of a single response, or a
    problem, such as for a stale receipt. The other batch operations work in the same way.
    """
    return await _settle_each(call, call.body.deliveries, settlements.ack)


@_on_many("retryMessages", "retry")
async def retry_batch(call: Call[NoFields, RetryBatch]) -> Reply[SettledBatch]:
    """Retry or discard many failed deliveries."""
    return await _settle_each(call, call.body.deliveries, settlements.retry)


@_on_many("deferMessages", "defer")
async def defer_batch(call: Call[NoFields, DeferBatch]) -> Reply[SettledBatch]:
    """Defer many deliveries."""
    return await _settle_each(call, call.body.deliveries, settlements.defer)


@_on_many("extendMessages", "extend")
async def extend_batch(call: Call[NoFields, ExtendBatch]) -> Reply[SettledBatch]:
    """Extend the ack timeouts of many deliveries."""
    return await _settle_each(call, call.body.deliveries, settlements.extend)


@_on_many("releaseMessages", "release")
async def release_batch(call: Call[NoFields, ReceiptBatch]) -> Reply[SettledBatch]:
    """Release many deliveries."""
    return await _settle_each(call, call.body.deliveries, settlements.release)


async def _settle_each(
    call: Call[NoFields, Any],
    requests: Sequence[S],
    settle: Callable[[GatewayContext, str, S, Receipt], Awaitable[Answer]],
) -> Reply[SettledBatch]:
    async def one(request: S) -> Answer:
        return await settle(
            call.hub,
            call.topic,
            request,
            decode_receipt(request.receipt, call.hub.clock.about_us()),
        )

    found = await gather_parts(map(one, requests))
    failed = [one for one in found if isinstance(one, Exception)]
    if len(failed) == len(found) and isinstance(failed[0], ServerUnavailable):
        raise failed[0]
    results = [
        SettledDelivery(problem=problem_answer(one))
        if isinstance(one, Exception)
        else SettledDelivery(**msgspec.structs.asdict(one))
        for one in found
    ]
    return answer(
        SettledBatch(results=results, succeeded=len(found) - len(failed), failed=len(failed))
    )
