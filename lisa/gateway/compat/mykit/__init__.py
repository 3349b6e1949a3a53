"""The HTTP API of mykit-delay, for its unchanged clients.

Differs where the original is wrong: `delete` reports whether the job existed, `finish` works, an id
is one job until it ends, and operations on all jobs need the scope `operate`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lisa.admin.garbage import requeue
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.keys import check_topic
from lisa.core.transitions.cancel import Cancelled
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.gateway.access import Scope
from lisa.gateway.compat.answering import answering, record_change
from lisa.gateway.compat.job_lookup import FoundJob, find_job
from lisa.gateway.compat.mykit.clearing import clear
from lisa.gateway.compat.mykit.restoring import Restorer
from lisa.gateway.compat.mykit.wire import (
    MARK,
    PREFIX,
    failure,
    job_of,
    outgoing_of,
    read_job,
    success,
    topics_in,
)
from lisa.gateway.context import GatewayContext
from lisa.gateway.long_poll import hold
from lisa.gateway.problems import ErrorResponse
from lisa.gateway.trace_context import trace_context
from lisa.gateway.waiter import HandedOut

__all__ = ["routes"]

WAIT_MS = 10_000
LONGEST_WAIT_MS = 60_000


def routes(hub: GatewayContext) -> list[BaseRoute]:
    """All paths below `/mykit`."""
    handlers = _Handlers(hub)
    return [
        Route(PREFIX + path, answering(handler, failure), methods=[method])
        for method, path, handler in (
            ("POST", "/push", handlers.push),
            ("GET", "/delete", handlers.delete),
            ("GET", "/finish", handlers.finish),
            ("GET", "/get/{topic}", handlers.get),
            ("GET", "/reStoreJob", handlers.restore_job),
            ("GET", "/reStore", handlers.restore),
            ("GET", "/reStore/{id:path}", handlers.restore_job),
            ("GET", "/clearAll", handlers.clear_all),
        )
    ]


def _response(content: bytes) -> Response:
    return Response(content, media_type="application/json")


class _Handlers:
    def __init__(self, hub: GatewayContext) -> None:
        self._hub = hub
        self._restorer = Restorer(hub)

    async def push(self, request: Request) -> Response:
        job = read_job(await request.body())
        self._hub.require(request, Scope.PRODUCE, job.topic, compat=True)
        trace = trace_context(request.headers)
        topic, message = outgoing_of(job, self._hub.clock.about_ms(), trace)
        sent = await self._hub.sender.offer(topic, message, OnDuplicate.KEEP_LIVE)
        return _response(success(sent.id))

    async def delete(self, request: Request) -> Response:
        job = await self._find(request, Scope.PRODUCE)
        outcome = await self._hub.sender.cancel(job.topic, _id(request))
        if outcome is not Cancelled.CANCELLED:
            raise _conflict(f"job {_id(request)!r} cannot be deleted: it is {outcome}")
        record_change(self._hub, request, "mykit.delete", topic=job.topic, id=_id(request))
        return _response(success())

    async def finish(self, request: Request) -> Response:
        job = await self._find(request, Scope.CONSUME)
        message_id = _id(request)
        if job.state == "acked":
            return _response(success())
        if await self._hub.settler.ack_by_id(job.topic, message_id) is None:
            # The consumer was too slow: the job was reclaimed and waits for its next attempt.
            late = (
                job.is_own
                and job.state in ("ready", "retry")
                and any(one.failed_attempts for one in job.seen.group_states)
            )
            if not late or await self._hub.sender.cancel(job.topic, message_id) != "cancelled":
                raise _conflict(f"job {message_id!r} is not in flight: it is {job.state}")
        return _response(success())

    async def get(self, request: Request) -> Response:
        topic = check_topic(request.path_params["topic"])
        token = self._hub.require(request, Scope.CONSUME, topic, compat=True)
        wait_ms = _wait_ms(request)

        def render(deliveries: list[HandedOut]) -> bytes:
            return success(job_of(deliveries[0].message) if deliveries else None)

        pull = self._hub.broker.pull(
            topic,
            group=request.query_params.get("group"),
            wait_s=wait_ms / 1000,
            may_declare=token.allows(Scope.OPERATE, topic),
        )
        return await hold(self._hub, request, pull, render)

    async def restore_job(self, request: Request) -> Response:
        message_id = _id(request)
        try:
            job: FoundJob | None = await self._find(request, Scope.OPERATE)
        except ErrorResponse:
            job = None
        if job is not None and job.is_live:
            for group in [one.group for one in job.seen.group_states if one.state == "garbage"]:
                flow = requeue(self._hub.store, job.topic, group, [message_id])
                await self._hub.store.drive(flow)
                details = {"topic": job.topic, "group": group, "id": message_id}
                record_change(self._hub, request, "mykit.reStoreJob", **details)
            return _response(success())
        self._hub.require(request, Scope.OPERATE, compat=True)
        counts = await self._restorer.restore(["--id", message_id, "--expire"])
        if not counts.get("restored"):
            raise _conflict(
                f"Job不存在! job {message_id!r} was not restored from the archive: {counts}"
            )
        record_change(self._hub, request, "mykit.reStoreJob", id=message_id)
        return _response(success())

    async def restore(self, request: Request) -> Response:
        self._hub.require(request, Scope.OPERATE, compat=True)
        expire = request.query_params.get("expire", "true").lower()
        if expire not in ("true", "false"):
            raise InvalidMessage(f"expire must be true or false, not {expire!r}")
        began = time.monotonic()
        counts = await self._restorer.restore(["--expire"] if expire == "true" else [])
        restored = counts.get("restored", 0)
        record_change(self._hub, request, "mykit.reStore", done=restored)
        return _response(success(_report(began, "恢复", restored)))

    async def clear_all(self, request: Request) -> Response:
        token = self._hub.require(request, Scope.OPERATE, compat=True)
        if not self._hub.settings.gateway_server.mykit_clear_all:
            raise ConfigError(
                "clearAll is disabled; set gateway-server.mykit-clear-all: true to enable it"
            )
        began, store = time.monotonic(), self._hub.store
        topics = [one for one in await store.drive(store.topics()) if token.sees(one)]
        total = await store.drive(clear(store, topics))
        record_change(self._hub, request, "mykit.clearAll", done=total)
        return _response(success(_report(began, "删除", total)))

    async def _find(self, request: Request, scope: Scope) -> FoundJob:
        """The job with the request's id. Raises ErrorResponse if there is none."""
        message_id, topic = _id(request), request.query_params.get("topic")

        def likely(known: Sequence[str]) -> set[str]:
            return set(topics_in(message_id)) & set(known)

        job = await find_job(self._hub, request, scope, message_id, topic, mark=MARK, likely=likely)
        if job is None:
            raise ErrorResponse(404, "unknown", f"there is no job {message_id!r}")
        return job


def _conflict(detail: str) -> ErrorResponse:
    """The problem for an operation that the job's state does not allow."""
    return ErrorResponse(409, "state", detail)


def _id(request: Request) -> str:
    """The job id: `jobId` in the original's code, `id` in its documentation."""
    found = request.path_params.get("id") or request.query_params.get("jobId")
    found = found or request.query_params.get("id")
    if not found:
        raise InvalidMessage("JobId 不能为空: add jobId=...")
    return str(found)


def _wait_ms(request: Request) -> int:
    text = request.query_params.get("timeout", str(WAIT_MS))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidMessage(f"timeout must be a number of milliseconds, not {text!r}")
    return min(int(text), LONGEST_WAIT_MS)


def _report(began: float, action: str, count: int) -> str:
    """The original's report text: duration and number of jobs."""
    took_ms = round((time.monotonic() - began) * 1000)
    return f"花费了{took_ms} ms，{action} {count} 行数据"  # noqa: RUF001  the original's text
