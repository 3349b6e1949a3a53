"""The HTTP API of delay-queue (yangwenjie88 and Ruffianjiang), for its unchanged clients.

Differs where the original is wrong: `push` returns the id, jobs can be deleted, the attempts of an
unfinished job are limited, and ids are unique on any number of machines.
"""

from __future__ import annotations

import re
import secrets
import zlib
from datetime import datetime
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lisa.core.model.clock import OLDEST_DUE_MS, check_due_ms, datetime_ms
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.message import Message
from lisa.core.model.options import MAX_ACK_TIMEOUT
from lisa.core.transitions.change import Cancelled
from lisa.core.transitions.enqueue import OnDuplicate, Sent
from lisa.gateway.access import Scope
from lisa.gateway.compat.requests import (
    FORM,
    FoundJob,
    answering,
    failed,
    find_job,
    read_form,
    record_change,
)
from lisa.gateway.context import GatewayContext
from lisa.gateway.long_poll import hold
from lisa.gateway.problems import ErrorResponse
from lisa.gateway.pulls import HandedOut
from lisa.gateway.trace_context import trace_context, with_trace
from lisa.producer import Outgoing

PREFIX = "/delay-queue"
DONE = "操作成功！"  # noqa: RUF001  the original's text
FAILED = "系统异常，请联系管理员"  # noqa: RUF001  as above
MARK = "ttrTime"
"""The header that marks every message sent through this API."""

_DELAY_TIME = "delayTime"
RETRY = "0,0,2m,10m,10m,1h,2h,6h,15h"
"""Retry delays of unfinished jobs, as planned in the original's documentation."""

EPOCH_MS = 1_577_836_800_000
"""Start of 2020, UTC. 41 bits of milliseconds last until 2089."""

TOPIC_BITS, RANDOM_BITS = 8, 14
_MILLISECONDS = re.compile(r"-?[0-9]{1,17}\Z")


def routes(gateway: GatewayContext) -> list[BaseRoute]:
    """All paths below `/delay-queue`."""
    return [
        Route(PREFIX + path, answering(partial(handler, gateway), _failure), methods=methods)
        for methods, path, handler in (
            (["POST"], "/push", _push),
            (["GET", "POST"], "/pop/{topic}", _pop),
            (["POST"], "/finish", _finish),
            (["POST"], "/delete", _delete),
        )
    ]


def id_of(topic: str, now_ms: int) -> str:
    """Generate an id: a 63-bit number, as the clients expect, that encodes a hint at its topic.

    It consists of milliseconds, eight bits of the topic's checksum, and random bits. Machines need
    no number: a duplicate id is rejected on sending, and another is generated.
    """
    head = ((now_ms - EPOCH_MS) << TOPIC_BITS) | _checksum(topic)
    return str((head << RANDOM_BITS) | secrets.randbits(RANDOM_BITS))


def may_be_of(topic: str, message_id: str) -> bool:
    """Whether an id's checksum bits match a topic."""
    if not (message_id.isascii() and message_id.isdigit() and len(message_id) < 20):
        return False
    return (int(message_id) >> RANDOM_BITS) & ((1 << TOPIC_BITS) - 1) == _checksum(topic)


def _checksum(topic: str) -> int:
    return zlib.crc32(topic.encode()) & ((1 << TOPIC_BITS) - 1)


def _failure(_request: Request, problem: ErrorResponse) -> Response:
    return failed(problem, _encode(code=1, msg=FAILED, exception=problem.detail))


def _encode(*, code: int = 0, msg: str = DONE, **more: Any) -> bytes:
    return msgspec.json.encode({"code": code, "msg": msg, **more})


def _response(**more: Any) -> Response:
    return Response(_encode(**more), media_type="application/json")


async def _push(gateway: GatewayContext, request: Request) -> Response:
    form = await _form(request)
    topic = _required(form, "topic")
    gateway.require(request, Scope.PRODUCE, topic, compat=True)
    due_ms = _due_ms(gateway, _required(form, _DELAY_TIME))
    ttr = _required(form, MARK)
    _ttr_s(ttr)
    text = _required(form, "message")
    own = {MARK: str(int(ttr)), _DELAY_TIME: str(due_ms)}
    headers = with_trace(own, trace_context(request.headers))
    at_ms = max(due_ms, OLDEST_DUE_MS)
    while True:
        message_id = id_of(topic, gateway.clock.about_ms())
        message = Outgoing(text, id=message_id, at_ms=at_ms, headers=headers, retry=RETRY)
        sent = await gateway.sender.offer(topic, message, OnDuplicate.REJECT)
        if sent.outcome is not Sent.REJECTED:
            return _response(id=sent.id)


def _due_ms(gateway: GatewayContext, text: str) -> int:
    """Parse a due time: epoch milliseconds, or date and time in the configured time zone."""
    if _MILLISECONDS.match(text):
        return _checked(int(text))
    zone = gateway.settings.gateway_server.delay_queue_zone
    try:
        moment = datetime.strptime(text, "%Y-%m-%d %H:%M:%S")  # noqa: DTZ007  zone: next line
        return _checked(datetime_ms(moment, zone))
    except (ValueError, OverflowError):
        raise InvalidMessage(
            f"delayTime {text!r} is neither epoch milliseconds nor yyyy-MM-dd HH:mm:ss"
        ) from None


async def _pop(gateway: GatewayContext, request: Request) -> Response:
    topic: str = request.path_params["topic"]
    token = gateway.require(request, Scope.CONSUME, topic, compat=True)

    def render(deliveries: list[HandedOut]) -> bytes:
        return _encode(data=_job(deliveries[0].message) if deliveries else None)

    group = request.query_params.get("group")
    pop = _pull(gateway, topic, group, may_declare=token.allows(Scope.OPERATE, topic))
    return await hold(gateway, request, pop, render)


async def _pull(
    gateway: GatewayContext, topic: str, group: str | None, *, may_declare: bool
) -> list[HandedOut]:
    """Pull one delivery and extend its ack timeout to the job's ttrTime."""
    broker = gateway.broker
    deliveries = await broker.pull(
        topic, group=group, wait_s=await broker.first_pull_s(topic), may_declare=may_declare
    )
    for delivery in deliveries:
        try:
            ttr_s = _ttr_s(delivery.message.headers.get(MARK, ""))
        except InvalidMessage:
            continue  # sent through another API: the topic's ack timeout applies
        try:
            await gateway.settler.extend(topic, delivery.receipt, ttr_s * 1000)
        except BaseException:
            gateway.broker.give_back(deliveries)
            raise
    return deliveries


async def _finish(gateway: GatewayContext, request: Request) -> Response:
    form = await _form(request)
    message_id = _required(form, "id")
    job = await _find(gateway, request, form, Scope.CONSUME)
    if job is None or job.message.state.is_final:
        return _response()  # as in the original, which deletes without looking
    if await gateway.settler.ack_by_id(job.topic, message_id) is None:
        if not job.is_own:
            raise ErrorResponse(409, "state", f"message {message_id} is not in flight")
        # The original finishes a job in any state, even after its timeout or before it is due.
        await _cancel(gateway, job.topic, message_id)
    return _response()


async def _delete(gateway: GatewayContext, request: Request) -> Response:
    form = await _form(request)
    job = await _find(gateway, request, form, Scope.PRODUCE)
    message_id = _required(form, "id")
    if job is None:
        raise ErrorResponse(404, "unknown", f"there is no job {message_id}")
    await _cancel(gateway, job.topic, message_id)
    record_change(gateway, request, "delay-queue.delete", topic=job.topic, id=message_id)
    return _response()


async def _cancel(gateway: GatewayContext, topic: str, message_id: str) -> None:
    outcome = await gateway.sender.cancel(topic, message_id)
    if outcome is not Cancelled.CANCELLED:
        raise ErrorResponse(409, "state", f"job {message_id} cannot be cancelled: it is {outcome}")


async def _find(
    gateway: GatewayContext, request: Request, form: dict[str, str], scope: Scope
) -> FoundJob | None:
    message_id, topic = _required(form, "id"), form.get("topic")
    return await find_job(
        gateway, request, scope, message_id, topic, mark=MARK, is_likely=may_be_of
    )


async def _form(request: Request) -> dict[str, str]:
    """The parameters of query and form body, merged as servlets do; the query takes precedence."""
    try:
        found = dict(await read_form(request, default=FORM))
    except ValueError as error:
        raise InvalidMessage(f"the form cannot be parsed: {error}") from None
    return {**found, **request.query_params}


def _required(form: dict[str, str], name: str) -> str:
    try:
        return form[name]
    except KeyError:
        raise InvalidMessage(f"Required request parameter '{name}' is not present") from None


def _checked(due_ms: int) -> int:
    """Any instant up to the year 9999; one before 1970 becomes 0. The original accepts them all."""
    check_due_ms(max(due_ms, OLDEST_DUE_MS))
    return max(due_ms, 0)


def _ttr_s(text: str) -> int:
    """The lease in seconds; 0, by which the original redelivers at once and for ever, is 1."""
    most = round(MAX_ACK_TIMEOUT.total_seconds())
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= most):
        raise InvalidMessage(f"ttrTime {text!r} is not a number of seconds from 0 to {most}")
    return max(1, int(text))


def _job(message: Message) -> dict[str, Any]:
    """A message in the original's job format, even if it was sent through another API."""
    headers = message.headers
    times = [headers.get(name, "") for name in (_DELAY_TIME, MARK)]
    due, ttr = (int(text) if text.isascii() and text.isdigit() else None for text in times)
    body = message.body
    if isinstance(body, bytes):
        body = body.decode("utf-8", "replace")
    elif not isinstance(body, str):
        body = msgspec.json.encode(body).decode()
    return {
        "id": message.id,
        "topic": message.topic,
        "delayTime": message.due_ms if due is None else due,
        "ttrTime": ttr or 0,
        "message": body,
    }
