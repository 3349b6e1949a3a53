"""mykit-delay's paths, so that its HTTP clients work unchanged.

What was wrong there is not repeated: a deletion says whether there was something to delete,
`finish` works, an id is pushed once, and what changes everything asks for an operator's token.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lisa.admin.garbage import requeue
from lisa.core.errors import ConfigError, InvalidMessage
from lisa.core.keys import check_topic
from lisa.core.transitions.cancel import Cancelled
from lisa.gateway.access import Scope
from lisa.gateway.compat.by_id import Job, find_job, refuse_foreign_pages, searched
from lisa.gateway.compat.mykit.clearing import clear
from lisa.gateway.compat.mykit.restoring import Restorer
from lisa.gateway.compat.mykit.wire import (
    MARK,
    PREFIX,
    job_of,
    outgoing_of,
    read_job,
    refused,
    said,
    topics_in,
)
from lisa.gateway.holding import ClientLeft, hold
from lisa.gateway.hub import Hub
from lisa.gateway.problems import Problem
from lisa.gateway.waiting import Delivery

__all__ = ["routes"]

WAIT_MS = 10_000
LONGEST_WAIT_MS = 60_000
_Handler = Callable[[Request], Awaitable[Response]]


def routes(hub: Hub) -> list[BaseRoute]:
    """All paths below `/mykit`."""
    face = _Face(hub)
    return [
        Route(PREFIX + path, _answering(handler), methods=[method])
        for method, path, handler in (
            ("POST", "/push", face.push),
            ("GET", "/delete", face.delete),
            ("GET", "/finish", face.finish),
            ("GET", "/get/{topic}", face.get),
            ("GET", "/reStoreJob", face.restore_job),
            ("GET", "/reStore", face.restore),
            ("GET", "/reStore/{id:path}", face.restore_job),
            ("GET", "/clearAll", face.clear_all),
        )
    ]


def _answering(handler: _Handler) -> _Handler:
    async def answer(request: Request) -> Response:
        try:
            refuse_foreign_pages(request)
            return await handler(request)
        except ClientLeft:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001  each becomes this system's kind of answer
            return refused(error)

    return answer


def _response(content: bytes) -> Response:
    return Response(content, media_type="application/json")


class _Face:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._restorer = Restorer(hub)

    async def push(self, request: Request) -> Response:
        job = read_job(await request.body())
        self._hub.require(request, Scope.PRODUCE, job.topic, compat=True)
        topic, message = outgoing_of(job, time.time_ns() // 1_000_000)
        sent = await self._hub.sender.offer(topic, message)
        return _response(said(sent.id))

    async def delete(self, request: Request) -> Response:
        job = await self._find(request, Scope.PRODUCE)
        outcome = await self._hub.sender.cancel(job.topic, _id(request))
        if outcome is not Cancelled.CANCELLED:
            raise _conflict(f"job {_id(request)!r} cannot be deleted: it is {outcome}")
        return _response(said())

    async def finish(self, request: Request) -> Response:
        job = await self._find(request, Scope.CONSUME)
        message_id = _id(request)
        if job.state == "acked":
            return _response(said())
        if await self._hub.settler.ack_by_id(job.topic, message_id) is None:
            # A consumer that was too slow: its job waits for the next attempt.
            late = (
                job.is_own
                and job.state in ("ready", "retry")
                and any(one.failed_attempts for one in job.seen.places)
            )
            if not late or await self._hub.sender.cancel(job.topic, message_id) != "cancelled":
                raise _conflict(f"job {message_id!r} is held by nobody: it is {job.state}")
        return _response(said())

    async def get(self, request: Request) -> Response:
        topic = check_topic(request.path_params["topic"])
        self._hub.require(request, Scope.CONSUME, topic, compat=True)
        wait_ms = _whole(request, "timeout", WAIT_MS, LONGEST_WAIT_MS)

        def render(deliveries: list[Delivery]) -> bytes:
            return said(job_of(deliveries[0].message) if deliveries else None)

        pull = self._hub.room.pull(topic, group=request.query_params.get("group"),
                                   wait_s=wait_ms / 1000)  # fmt: skip
        return await hold(self._hub, request, pull, render)

    async def restore_job(self, request: Request) -> Response:
        message_id = _id(request)
        try:
            job: Job | None = await self._find(request, Scope.OPERATE)
        except Problem:
            job = None
        if job is not None and job.is_live:
            for place in job.seen.places:
                if place.state == "garbage":
                    flow = requeue(self._hub.store, job.topic, place.group, [message_id])
                    await self._hub.store.drive(flow)
            return _response(said())
        self._hub.require(request, Scope.OPERATE, compat=True)
        counts = await self._restorer.restore(["--id", message_id, "--expire"])
        if not counts.get("restored"):
            raise _conflict(f"Job不存在! the archive puts back no job {message_id!r}: {counts}")
        return _response(said())

    async def restore(self, request: Request) -> Response:
        self._hub.require(request, Scope.OPERATE, compat=True)
        expire = request.query_params.get("expire", "true").lower()
        if expire not in ("true", "false"):
            raise InvalidMessage(f"expire is true or false, not {expire!r}")
        began = time.monotonic()
        counts = await self._restorer.restore(["--expire"] if expire == "true" else [])
        return _response(said(_report(began, "恢复", counts.get("restored", 0))))

    async def clear_all(self, request: Request) -> Response:
        token = self._hub.require(request, Scope.OPERATE, compat=True)
        if not self._hub.settings.gateway_server.mykit_clear_all:
            raise ConfigError(
                "clearAll is switched off; gateway-server.mykit-clear-all: true allows it"
            )
        began, store = time.monotonic(), self._hub.store
        topics = [one for one in await store.drive(store.topics()) if token.sees(one)]
        total = await store.drive(clear(store, topics))
        return _response(said(_report(began, "删除", total)))

    async def _find(self, request: Request, scope: Scope) -> Job:
        """The job of the id that a request names. Raises Problem where there is none."""
        message_id, named = _id(request), request.query_params.get("topic")
        if named is not None:
            self._hub.require(request, scope, named, compat=True)
            topics: Any = [[named]]
        else:
            self._hub.require(request, None, compat=True)
            known = await self._hub.store.drive(self._hub.store.topics())
            first = set(topics_in(message_id)) & set(known)
            topics = searched(self._hub, request, scope, first, known)
        job = await find_job(
            self._hub, message_id, MARK, topics, or_handed_out=scope is Scope.CONSUME
        )
        if job is None:
            raise Problem(404, "unknown", f"there is no job {message_id!r}")
        return job


def _conflict(what: str) -> Problem:
    """What cannot be done to a job as it stands."""
    return Problem(409, "state", what)


def _id(request: Request) -> str:
    """`jobId`, as the code has it, or `id`, as its pages say."""
    found = request.path_params.get("id") or request.query_params.get("jobId")
    found = found or request.query_params.get("id")
    if not found:
        raise InvalidMessage("JobId 不能为空: name the job, jobId=...")
    return str(found)


def _whole(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidMessage(f"{name} is a number of milliseconds, not {text!r}")
    return min(int(text), most)


def _report(began: float, what: str, count: int) -> str:
    """The original's sentence: how long it took, and how many."""
    took_ms = round((time.monotonic() - began) * 1000)
    return f"花费了{took_ms} ms，{what} {count} 行数据"  # noqa: RUF001  the original's very text
