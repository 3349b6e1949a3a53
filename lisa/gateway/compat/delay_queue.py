"""delay-queue's paths (yangwenjie88 and Ruffianjiang), so that their HTTP clients work unchanged.

What was wrong there is not repeated: `push` tells the id, jobs can be deleted, attempts that nobody
finishes come to an end, and ids are unique on any number of machines.
"""

from __future__ import annotations

import re
import secrets
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lisa.core.clock import check_due_ms, datetime_ms
from lisa.core.errors import InvalidMessage
from lisa.core.keys import check_topic
from lisa.core.message import Message
from lisa.core.options import MAX_ACK_TIMEOUT
from lisa.core.transitions.cancel import Cancelled
from lisa.core.transitions.enqueue import OnDuplicate, Sent
from lisa.gateway.access import Scope
from lisa.gateway.compat.by_id import Job, find_job, refuse_foreign_pages, searched
from lisa.gateway.holding import ClientLeft, hold
from lisa.gateway.hub import Hub
from lisa.gateway.problems import Problem, problem_of
from lisa.gateway.waiting import Delivery
from lisa.producer import Outgoing

__all__ = ["id_of", "may_be_of", "routes"]

PREFIX = "/delay-queue"
DONE = "操作成功！"  # noqa: RUF001  the original's very text
FAILED = "系统异常，请联系管理员"  # noqa: RUF001  as above
MARK = "ttrTime"
"""The header that every message of this face has."""

_DELAY_TIME = "delayTime"
RETRY = "0,0,2m,10m,10m,1h,2h,6h,15h"
"""What its pages plan for a job that nobody finishes: at once twice, then less and less often."""

EPOCH_MS = 1_577_836_800_000
"""2020: 41 bits of milliseconds last until 2089."""

TOPIC_BITS, RANDOM_BITS = 8, 14
_MILLISECONDS = re.compile(r"-?[0-9]{1,17}\Z")
_Handler = Callable[[Request], Awaitable[Response]]


def routes(hub: Hub) -> list[BaseRoute]:
    """All paths below `/delay-queue`."""
    face = _Face(hub)
    return [
        Route(PREFIX + path, _answering(handler), methods=methods)
        for methods, path, handler in (
            (["POST"], "/push", face.push),
            (["GET", "POST"], "/pop/{topic}", face.pop),
            (["POST"], "/finish", face.finish),
            (["POST"], "/delete", face.delete),
        )
    ]


def id_of(topic: str) -> str:
    """A fresh id: a number of 63 bits, as its clients keep them, that leads to its topic.

    Milliseconds, eight bits of the topic's checksum, the rest random. No machine has a number; one
    that is taken is noticed when it is sent, and another one is made.
    """
    now = time.time_ns() // 1_000_000 - EPOCH_MS
    head = (now << TOPIC_BITS) | _checksum(topic)
    return str((head << RANDOM_BITS) | secrets.randbits(RANDOM_BITS))


def may_be_of(topic: str, message_id: str) -> bool:
    """Whether an id could have been made for a topic."""
    if not (message_id.isascii() and message_id.isdigit() and len(message_id) < 20):
        return False
    return (int(message_id) >> RANDOM_BITS) & ((1 << TOPIC_BITS) - 1) == _checksum(topic)


def _checksum(topic: str) -> int:
    return zlib.crc32(topic.encode()) & ((1 << TOPIC_BITS) - 1)


def _answering(handler: _Handler) -> _Handler:
    async def answer(request: Request) -> Response:
        try:
            refuse_foreign_pages(request)
            return await handler(request)
        except ClientLeft:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001  each becomes this system's kind of answer
            problem = problem_of(error)
            # The original answers 200 whatever happened; what stands between client and queue
            # (tokens, bounds, a server that is away) keeps its status.
            status = 200 if problem.status in (400, 404, 409) else problem.status
            content = _encode(code=1, msg=FAILED, exception=problem.detail)
            return Response(content, status, problem.headers, "application/json")

    return answer


def _encode(*, code: int = 0, msg: str = DONE, **more: Any) -> bytes:
    return msgspec.json.encode({"code": code, "msg": msg, **more})


def _response(**more: Any) -> Response:
    return Response(_encode(**more), media_type="application/json")


class _Face:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def push(self, request: Request) -> Response:
        form = await _form(request)
        topic = check_topic(_wanted(form, "topic"))
        self._hub.require(request, Scope.PRODUCE, topic, compat=True)
        due_ms = self._due_ms(_wanted(form, _DELAY_TIME))
        ttr_s = _ttr_s(_wanted(form, MARK))
        text = _wanted(form, "message")
        headers = {MARK: str(ttr_s), _DELAY_TIME: str(due_ms)}
        while True:
            message = Outgoing(text, id=id_of(topic), at_ms=due_ms, headers=headers, retry=RETRY)
            sent = await self._hub.sender.offer(topic, message, OnDuplicate.REJECT)
            if sent.outcome is not Sent.REJECTED:
                return _response(id=sent.id)

    def _due_ms(self, text: str) -> int:
        """The due time from 13 digits, or date and time in the configured zone."""
        if _MILLISECONDS.match(text):
            return check_due_ms(int(text))
        zone = self._hub.settings.gateway_server.delay_queue_zone
        try:
            moment = datetime.strptime(text, "%Y-%m-%d %H:%M:%S")  # noqa: DTZ007  zone: next line
            return check_due_ms(datetime_ms(moment, zone))
        except (ValueError, OverflowError):
            raise InvalidMessage(
                f"delayTime {text!r} is neither epoch milliseconds nor yyyy-MM-dd HH:mm:ss"
            ) from None

    async def pop(self, request: Request) -> Response:
        topic = check_topic(request.path_params["topic"])
        self._hub.require(request, Scope.CONSUME, topic, compat=True)

        def render(deliveries: list[Delivery]) -> bytes:
            return _encode(data=_job(deliveries[0].message) if deliveries else None)

        group = request.query_params.get("group")
        return await hold(self._hub, request, self._pop(topic, group), render)

    async def _pop(self, topic: str, group: str | None) -> list[Delivery]:
        """One delivery, held for as long as its job says it takes: known once it is there."""
        deliveries = await self._hub.room.pull(topic, group=group)
        for one in deliveries:
            try:
                ttr_s = _ttr_s(one.message.headers.get(MARK, ""))
            except InvalidMessage:
                continue  # not of this face: the topic's own ack timeout counts
            try:
                await self._hub.settler.extend(topic, one.receipt, ttr_s * 1000)
            except BaseException:
                self._hub.room.give_back(deliveries)
                raise
        return deliveries

    async def finish(self, request: Request) -> Response:
        form = await _form(request)
        message_id = _wanted(form, "id")
        job = await self._find(request, form, Scope.CONSUME)
        if job.is_live and await self._hub.settler.ack_by_id(job.topic, message_id) is None:
            if not job.is_own:
                raise Problem(409, "state", f"message {message_id} is held by nobody any more")
            # The original ends a job wherever it stands: one whose time was up, one not yet due.
            await self._cancel(job.topic, message_id)
        return _response()

    async def delete(self, request: Request) -> Response:
        form = await _form(request)
        job = await self._find(request, form, Scope.PRODUCE)
        await self._cancel(job.topic, _wanted(form, "id"))
        return _response()

    async def _cancel(self, topic: str, message_id: str) -> None:
        outcome = await self._hub.sender.cancel(topic, message_id)
        if outcome is not Cancelled.CANCELLED:
            raise Problem(409, "state", f"job {message_id} cannot be taken back: it is {outcome}")

    async def _find(self, request: Request, form: dict[str, str], scope: Scope) -> Job:
        message_id, named = _wanted(form, "id"), form.get("topic")
        if named is not None:
            self._hub.require(request, scope, named, compat=True)
            topics: Iterable[Iterable[str]] = [[named]]
        else:
            self._hub.require(request, None, compat=True)
            known = await self._hub.store.drive(self._hub.store.topics())
            likely = [one for one in known if may_be_of(one, message_id)]
            topics = searched(self._hub, request, scope, likely, known)
        job = await find_job(
            self._hub, message_id, MARK, topics, or_handed_out=scope is Scope.CONSUME
        )
        if job is None:
            raise Problem(404, "unknown", f"there is no job {message_id}")
        return job


async def _form(request: Request) -> dict[str, str]:
    """The parameters of query and body, as servlets take them together; the query's go first."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    found = {}
    if kind in ("", "application/x-www-form-urlencoded"):
        try:
            text = (await request.body()).decode("utf-8")
            pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=100)
        except ValueError as error:
            raise InvalidMessage(f"the form cannot be read: {error}") from None
        found = dict(pairs)
    return {**found, **request.query_params}


def _wanted(form: dict[str, str], name: str) -> str:
    try:
        return form[name]
    except KeyError:
        raise InvalidMessage(f"Required request parameter '{name}' is not present") from None


def _ttr_s(text: str) -> int:
    most = round(MAX_ACK_TIMEOUT.total_seconds())
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise InvalidMessage(f"ttrTime {text!r} is not a number of seconds from 1 to {most}")
    return int(text)


def _job(message: Message) -> dict[str, Any]:
    """A message as the job that it was; one that came another way is made to look like one."""
    headers = message.headers
    times = [headers.get(name, "") for name in (_DELAY_TIME, MARK)]
    due, ttr = (int(one) if one.isascii() and one.isdigit() else None for one in times)
    body = message.body
    if isinstance(body, bytes):
        body = body.decode("utf-8", "replace")
    elif not isinstance(body, str):
        body = msgspec.json.encode(body).decode()
    return {
        "id": message.id, "topic": message.topic,
        "delayTime": message.due_ms if due is None else due, "ttrTime": ttr or 0, "message": body,
    }  # fmt: skip
