"""Sending, one message or many."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby
from typing import NamedTuple, TypeAlias

import msgspec
from starlette.responses import Response

from lisa.core.errors import InvalidMessage, LisaError, ServerUnavailable
from lisa.core.retry_policy import RetryPolicy
from lisa.core.transitions.enqueue import OnDuplicate, Sent
from lisa.gateway.hub import Hub
from lisa.gateway.native.bodies import read_body
from lisa.gateway.native.models import (
    BatchAnswer,
    BatchRequest,
    BatchResult,
    NoFields,
    SendAnswer,
    SendRequest,
)
from lisa.gateway.native.models import Problem as ProblemAnswer
from lisa.gateway.native.operations import Call, answer, read_json
from lisa.gateway.problems import Problem, problem_of
from lisa.producer import Outgoing
from lisa.producer.calls import Single, single
from lisa.producer.plan import Plan
from lisa.producer.report import SendOutcome

__all__ = ["send", "send_batch"]

_item_decoder = msgspec.json.Decoder(SendRequest)

_PLAN = Plan()

_Found: TypeAlias = SendOutcome | LisaError | Problem


class _Ready(NamedTuple):
    """One message of a batch: its place there, and itself as it was given and as it is sent."""

    place: int
    mode: OnDuplicate
    outgoing: Outgoing
    single: Single


async def send(call: Call[NoFields, SendRequest]) -> Response:
    """Send one message; those of requests that meet go to the server together."""
    request = call.body
    sent = await call.hub.sender.offer(
        call.topic, _outgoing(request), request.on_duplicate or OnDuplicate.KEEP
    )
    if sent.outcome is Sent.REJECTED:
        raise _rejected(call.topic, sent)
    status = 201 if sent.outcome is Sent.ACCEPTED else 200
    return answer(SendAnswer(id=sent.id, outcome=sent.outcome), status)


async def send_batch(call: Call[NoFields, BatchRequest]) -> Response:
    """Send many messages, each with its own outcome or problem."""
    otherwise = call.body.on_duplicate or OnDuplicate.KEEP
    found: dict[int, _Found] = {}
    ready: list[_Ready] = []
    for place, raw in enumerate(call.body.messages):
        try:
            item = read_json(_item_decoder, raw)
            outgoing = _outgoing(item)
            ready.append(
                _Ready(place, item.on_duplicate or otherwise, outgoing, single(_PLAN, outgoing))
            )
        except (Problem, InvalidMessage) as error:
            found[place] = error
    outage: ServerUnavailable | None = None
    for mode, some in groupby(ready, key=lambda one: one.mode):
        part = list(some)
        if outage is None:
            results = await _send_part(call.hub, call.topic, part, mode)
        else:  # one patience for the whole batch
            results = [outage] * len(part)
        found.update(zip((one.place for one in part), results, strict=True))
        if isinstance(results[-1], ServerUnavailable):
            outage = results[-1]
    if outage and all(isinstance(one, ServerUnavailable) for one in found.values()):
        raise outage
    return answer(_batch_answer([found[place] for place in sorted(found)]))


async def _send_part(
    hub: Hub, topic: str, part: Sequence[_Ready], mode: OnDuplicate
) -> list[_Found]:
    """What became of each. Where one is at fault the others of its script call go, too."""
    sent, error = await hub.sender.offer_many(topic, [one.single for one in part], mode)
    found: list[_Found] = list(sent)
    rest = part[len(sent) :]
    if isinstance(error, InvalidMessage):
        offers = (hub.sender.offer(topic, one.outgoing, mode) for one in rest)
        for result in await asyncio.gather(*offers, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, LisaError):
                raise result
            found.append(result)
    elif error is not None:
        found += [error] * len(rest)
    return found


def _batch_answer(found: Sequence[_Found]) -> BatchAnswer:
    results = [
        BatchResult(id=one.id, outcome=one.outcome) if isinstance(one, SendOutcome)
        else BatchResult(problem=msgspec.convert(problem_of(one).content, ProblemAnswer))
        for one in found
    ]  # fmt: skip
    counts = Counter(one.outcome for one in found if isinstance(one, SendOutcome))
    return BatchAnswer(
        results=results, accepted=counts[Sent.ACCEPTED], duplicate=counts[Sent.DUPLICATE],
        replaced=counts[Sent.REPLACED], rejected=counts[Sent.REJECTED],
        failed=len(found) - counts.total(),
    )  # fmt: skip


def _outgoing(request: SendRequest) -> Outgoing:
    delay, ttl, retry = request.delay_ms, request.ttl_ms, request.retry
    return Outgoing(
        read_body(request),
        id=request.id,
        delay=None if delay is None else timedelta(milliseconds=delay),
        at_ms=request.due_ms,
        ttl=None if ttl is None else timedelta(milliseconds=ttl),
        retry=RetryPolicy(tuple(retry)) if isinstance(retry, list) else retry,
        headers=request.headers,
    )


def _rejected(topic: str, sent: SendOutcome) -> Problem:
    return Problem(
        409, "duplicate", f"message {sent.id!r} is already known on topic {topic!r}",
        id=sent.id, outcome=sent.outcome,
    )  # fmt: skip
