"""Operations that pull messages and settle deliveries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType

from lisa.core.delivery.source import MOST
from lisa.core.model.errors import ServerUnavailable
from lisa.core.model.keys import shown_id
from lisa.core.model.outcomes import Discard
from lisa.core.store.inspection import found
from lisa.core.transitions.ack import Acked
from lisa.core.transitions.retry import Deferred, Failed
from lisa.gateway.access import Scope
from lisa.gateway.api.messages import unknown
from lisa.gateway.api.operations import (
    MESSAGE,
    NO_GROUP,
    TOPIC,
    Call,
    Operations,
    Problems,
    Reply,
)
from lisa.gateway.api.types import (
    ACK_TIMEOUT,
    MOST_ITEMS,
    AckTimeout,
    Answer,
    AnswerWithId,
    Name,
    NoFields,
    Problem,
    PullWait,
    ReceiptText,
    Request,
    RetryPause,
    invalid,
    one_of,
    problem_answer,
    response_body,
)
from lisa.gateway.context import gather_parts
from lisa.gateway.long_poll import hold
from lisa.gateway.problems import ErrorResponse
from lisa.gateway.pulls import HandedOut
from lisa.gateway.settling import Receipt, decode_receipt


class ReceiptRequest(Request):
    """Identifies a delivery by its receipt."""

    receipt: ReceiptText


class AckAnswer(AnswerWithId, kw_only=True):
    """The delivery is settled. `late`: after its ack timeout; `repeated`: already acked before."""

    outcome: Annotated[str, one_of(Acked.ACKED, Acked.LATE, Acked.REPEATED)]


class RetryRequest(Request):
    """Reports a failed delivery."""

    receipt: ReceiptText
    delay_ms: Annotated[
        RetryPause | None,
        Meta(description="Delay until the next attempt; defaults to the retry policy."),
    ] = None
    reason: Annotated[str | None, Meta(description="The reason; truncated to 1,024 bytes.")] = None
    discard: Annotated[
        bool, Meta(description="Move the message to garbage without further attempts.")
    ] = False


class RetryAnswer(AnswerWithId, kw_only=True):
    """The outcome: `retrying` at `due_ms`, or `dead`, which means in garbage."""

    outcome: Annotated[str, one_of(Failed.RETRYING, Failed.DEAD)]
    due_ms: int | None
    attempts: Annotated[int, Meta(description="Failed attempts.")]


class DeferRequest(Request):
    """Puts a delivery off, because it cannot be handled now."""

    receipt: ReceiptText
    delay_ms: Annotated[RetryPause, Meta(description="Delay until the next delivery.")]
    reason: Annotated[str | None, Meta(description="The reason; truncated to 1,024 bytes.")] = None
    rests_lane: Annotated[
        bool, Meta(description="A limit was met: the other messages of the key wait as long.")
    ] = False


class DeferAnswer(AnswerWithId, kw_only=True):
    """The message is deferred until `due_ms`."""

    outcome: Annotated[str, one_of(Deferred.DEFERRED)]
    due_ms: int


class ExtendRequest(Request):
    """Restarts a delivery's ack timeout."""

    receipt: ReceiptText
    ack_timeout_ms: Annotated[
        AckTimeout | None,
        Meta(description="The new ack timeout, counted from now; defaults to that of the pull."),
    ] = None


class HeldAnswer(AnswerWithId, kw_only=True):
    """Confirms that the delivery was still held; a stale receipt gets a problem instead."""

    held: Annotated[bool, Meta(extra_json_schema={"const": True})]


_BatchSize = Meta(min_length=1, max_length=MOST_ITEMS)


class ReceiptBatch(Request):
    """Deliveries to ack or release."""

    deliveries: Annotated[list[ReceiptRequest], _BatchSize]


class RetryBatch(Request):
    """Failed deliveries, each with the fields of a single retry."""

    deliveries: Annotated[list[RetryRequest], _BatchSize]


class DeferBatch(Request):
    """Deliveries to defer, each with the fields of a single defer."""

    deliveries: Annotated[list[DeferRequest], _BatchSize]


class ExtendBatch(Request):
    """Deliveries to extend, each with the fields of a single extend."""

    deliveries: Annotated[list[ExtendRequest], _BatchSize]


class SettledDelivery(Answer):
    """The result of one delivery of a batch: the fields of the single response, or a problem."""

    id: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    outcome: str | UnsetType = UNSET
    due_ms: int | UnsetType | None = UNSET
    attempts: int | UnsetType = UNSET
    held: bool | UnsetType = UNSET
    problem: Problem | UnsetType = UNSET


class SettledBatch(Answer):
    """The results in request order; `failed` have a problem."""

    results: list[SettledDelivery]
    succeeded: int
    failed: int


class PullRequest(Request):
    """A pull. The response is sent with the first messages, or empty after `wait_ms`."""

    max: Annotated[int, Meta(ge=1, le=MOST)] = 1
    wait_ms: PullWait = 0
    ack_timeout_ms: Annotated[AckTimeout | None, ACK_TIMEOUT] = None
    group: Annotated[Name | None, Meta(description="Defaults to the topic's only group.")] = None


class DeliveryAnswer(AnswerWithId, kw_only=True):
    """One delivered message, held until its ack timeout."""

    receipt: str
    attempt: Annotated[int, Meta(description="1 for the first delivery.")]
    due_ms: int
    headers: dict[str, str]
    body: Any | UnsetType = UNSET
    body_base64: str | UnsetType = UNSET


class PullAnswer(Answer):
    """The deliveries; empty if no message became due in time."""

    deliveries: list[DeliveryAnswer]


STALE: Problems = {
    404: "The message or the topic is unknown, or the group was removed.",
    409: "Nothing was changed, because the receipt is stale: the delivery was settled, or its ack "
    "timeout passed and the message was reclaimed. `state` is the message's current state.",
}

operations = Operations("Deliveries")

_encoder = msgspec.json.Encoder()


@operations.add(
    "POST",
    f"{TOPIC}/pull",
    "The deliveries; may be empty.",
    scope=Scope.CONSUME,
    is_body_optional=True,
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
    work = call.gateway.broker.pull(
        call.topic,
        group=wanted.group,
        most=wanted.max,
        wait_s=wanted.wait_ms / 1000,
        ack_timeout_ms=wanted.ack_timeout_ms,
        may_declare=call.token.allows(Scope.OPERATE, call.topic),
    )
    response = await hold(call.gateway, call.request, work, _written)
    return cast("Reply[PullAnswer]", response)  # its content is that of _written


def _written(deliveries: Sequence[HandedOut]) -> bytes:
    return _encoder.encode(PullAnswer(deliveries=[_delivery(delivery) for delivery in deliveries]))


def _delivery(handed_out: HandedOut) -> DeliveryAnswer:
    message = handed_out.message
    return DeliveryAnswer(
        id=message.id,
        receipt=handed_out.receipt_text,
        attempt=message.attempt,
        due_ms=message.due_ms,
        headers=message.headers,
        **response_body(message.body),
    )


_on_one = partial(operations.add, "POST", scope=Scope.CONSUME, problems=STALE)
"""Declares an operation on one delivery. Its handler also serves batches and gRPC's streams."""


@_on_one(f"{MESSAGE}/ack", "Settled.")
async def ack_message(call: Call[NoFields, ReceiptRequest]) -> AckAnswer:
    """Ack a delivery."""
    receipt = _receipt(call)
    outcome = await call.gateway.settler.ack(call.topic, receipt)
    if outcome is Acked.STALE:
        raise await _stale(call, receipt)
    return AckAnswer(id=receipt.settlement.id, outcome=outcome)


@_on_one(f"{MESSAGE}/retry", "The message will be retried, or is in garbage.")
async def retry_message(call: Call[NoFields, RetryRequest]) -> RetryAnswer:
    """Retry or discard a failed delivery."""
    receipt, wanted = _receipt(call), call.body
    if wanted.discard and wanted.delay_ms is not None:
        raise invalid("give either delay_ms or discard, not both")
    default = str(Discard()) if wanted.discard else "the client asked for a retry"
    retried = await call.gateway.settler.retry(
        call.topic,
        receipt,
        reason=wanted.reason or default,
        delay="discard" if wanted.discard else wanted.delay_ms,
    )
    if retried.outcome is Failed.STALE:
        raise await _stale(call, receipt)
    return RetryAnswer(
        id=receipt.settlement.id,
        outcome=retried.outcome,
        due_ms=retried.due_ms,
        attempts=retried.failed_attempts,
    )


@_on_one(f"{MESSAGE}/defer", "Deferred.")
async def defer_message(call: Call[NoFields, DeferRequest]) -> DeferAnswer:
    """Defer a delivery that cannot be handled now.

    The message is redelivered after the delay, without counting an attempt. With `rests_lane`, no
    other message of its key is delivered to the group meanwhile.
    """
    receipt, wanted = _receipt(call), call.body
    reason = wanted.reason or "the client deferred the message"
    said = await call.gateway.settler.defer(
        call.topic,
        receipt,
        delay_ms=wanted.delay_ms,
        reason=reason,
        rests_lane=wanted.rests_lane,
    )
    if said.due_ms is None:
        raise await _stale(call, receipt)
    return DeferAnswer(id=receipt.settlement.id, outcome=said.outcome, due_ms=said.due_ms)


@_on_one(f"{MESSAGE}/extend", "The ack timeout restarts.")
async def extend_message(call: Call[NoFields, ExtendRequest]) -> HeldAnswer:
    """Extend a delivery's ack timeout."""
    receipt = _receipt(call)
    if not await call.gateway.settler.extend(call.topic, receipt, call.body.ack_timeout_ms):
        raise await _stale(call, receipt, held=False)
    return HeldAnswer(id=receipt.settlement.id, held=True)


@_on_one(f"{MESSAGE}/release", "Released.")
async def release_message(call: Call[NoFields, ReceiptRequest]) -> HeldAnswer:
    """Release a delivery.

    The message is redelivered immediately, without counting an attempt.
    """
    receipt = _receipt(call)
    if not await call.gateway.settler.release(call.topic, receipt):
        raise await _stale(call, receipt, held=False)
    return HeldAnswer(id=receipt.settlement.id, held=True)


def _receipt(call: Call[NoFields, Any]) -> Receipt:
    """The receipt of a request. Raises ErrorResponse if the path has the id of another message."""
    receipt = decode_receipt(call.body.receipt, call.gateway.clock.about_us())
    if receipt.settlement.id != call.path.get("id", receipt.settlement.id):
        held, named = shown_id(receipt.settlement.id), shown_id(call.id)
        raise invalid(f"the receipt is for message {held!r}, not {named!r}")
    return receipt


async def _stale(call: Call[NoFields, Any], receipt: Receipt, **more: Any) -> ErrorResponse:
    """The problem for a stale receipt, with the message's current state."""
    topic, message_id = call.topic, receipt.settlement.id
    now = found(topic, message_id, await call.gateway.settler.look(topic, message_id, bodies=False))
    if now is None:
        return await unknown(call.gateway, topic, message_id)
    return ErrorResponse(
        409,
        "stale",
        f"the receipt of message {shown_id(message_id)!r} is stale: the message is now {now.state}",
        id=message_id,
        outcome="stale",
        state=now.state,
        **more,
    )


_on_many = partial(
    operations.add,
    "POST",
    answers="The result of each delivery, even if some failed.",
    scope=Scope.CONSUME,
)
"""Declares an operation on a batch of deliveries."""


@_on_many(f"{TOPIC}/messages:batch-ack")
async def ack_messages(call: Call[NoFields, ReceiptBatch]) -> SettledBatch:
    """Ack many deliveries.

    Each delivery has its own result, in request order: the fields of a single response, or a
    problem, such as for a stale receipt. The other batch operations work in the same way.
    """
    return await _settle_each(call, ack_message)


@_on_many(f"{TOPIC}/messages:batch-retry")
async def retry_messages(call: Call[NoFields, RetryBatch]) -> SettledBatch:
    """Retry or discard many failed deliveries."""
    return await _settle_each(call, retry_message)


@_on_many(f"{TOPIC}/messages:batch-defer")
async def defer_messages(call: Call[NoFields, DeferBatch]) -> SettledBatch:
    """Defer many deliveries."""
    return await _settle_each(call, defer_message)


@_on_many(f"{TOPIC}/messages:batch-extend")
async def extend_messages(call: Call[NoFields, ExtendBatch]) -> SettledBatch:
    """Extend the ack timeouts of many deliveries."""
    return await _settle_each(call, extend_message)


@_on_many(f"{TOPIC}/messages:batch-release")
async def release_messages(call: Call[NoFields, ReceiptBatch]) -> SettledBatch:
    """Release many deliveries."""
    return await _settle_each(call, release_message)


async def _settle_each(
    call: Call[NoFields, Any], settle: Callable[[Call[NoFields, Any]], Awaitable[Answer]]
) -> SettledBatch:
    calls = [replace(call, body=delivery) for delivery in call.body.deliveries]
    results = await gather_parts(map(settle, calls))
    failed = [result for result in results if isinstance(result, Exception)]
    if len(failed) == len(results) and isinstance(failed[0], ServerUnavailable):
        raise failed[0]
    return SettledBatch(
        results=[
            SettledDelivery(problem=problem_answer(result))
            if isinstance(result, Exception)
            else SettledDelivery(**msgspec.structs.asdict(result))
            for result in results
        ],
        succeeded=len(results) - len(failed),
        failed=len(failed),
    )
