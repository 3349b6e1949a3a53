"""The HTTP API of mykit-delay, for its unchanged clients.

Differs where the original is wrong: `delete` reports whether the job existed, `finish` works, an id
is one job until it ends, and operations on all jobs need the scope `operate`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lisa.admin.garbage import requeue
from lisa.admin.messages import LiveState, list_messages
from lisa.core.daemon.processes import python, writable_folder
from lisa.core.model.clock import MAX_DUE_MS, OLDEST_DUE_MS
from lisa.core.model.envelope import new_id
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.message import Message
from lisa.core.redis.flow import Flow
from lisa.core.store.inspection import State, found
from lisa.core.store.store import Store
from lisa.core.transitions.change import Cancel, Cancelled
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.core.transitions.inspect import Inspect
from lisa.gateway.access import Scope
from lisa.gateway.compat.requests import (
    FoundJob,
    answering,
    failed,
    find_job,
    record_change,
    text_of,
)
from lisa.gateway.context import GatewayContext
from lisa.gateway.long_poll import hold
from lisa.gateway.problems import ErrorResponse
from lisa.gateway.pulls import HandedOut
from lisa.gateway.shares import Crowded
from lisa.gateway.trace_context import trace_context
from lisa.producer import Outgoing

PREFIX = "/mykit"
MARK = "mykit-create-time"
"""The header that marks every message sent through this API."""

_DELAY, _TTL = "mykit-delay", "mykit-ttl"
READY = 2
"""The original's status of a due job; every delivered job has it."""

PUSHABLE = (0, 5)
"""The statuses that a pushed job may have: WaitPut and Restore."""

PAGE = 50
"""Messages per page; small, because the bodies are read to find the API's header."""

STATES = (LiveState.WAITING, LiveState.READY, LiveState.RETRY, LiveState.GARBAGE)
"""Messages in flight are not cancelled."""

WITHIN_S = 3600.0
SHOWN = 500
WAIT_MS = 10_000
LONGEST_WAIT_MS = 60_000


class Job(msgspec.Struct, kw_only=True):
    """A pushed job. Unknown fields are ignored; null means absent."""

    topic: str | None = None
    subtopic: str | None = None
    id: str | None = None
    bizKey: str | None = None  # noqa: N815  the JSON name
    delay: int | None = None
    ttl: int | None = None
    body: str | None = None
    createTime: int | None = None  # noqa: N815  as above
    status: int | None = None


_decoder = msgspec.json.Decoder(Job, strict=False)


def read_job(data: bytes) -> Job:
    """Parse a job. Raises InvalidMessage."""
    try:
        job = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidMessage(f"the request body is not a job: {error}") from None
    if not job.topic:
        raise InvalidMessage("参数topic错误: topic is missing")
    if (job.status or 0) not in PUSHABLE:
        raise InvalidMessage(f"status must be 0 or 5, not {job.status}")
    delay = job.delay or 0
    if delay < 0:
        raise InvalidMessage(f"delay must be at least 0 ms, not {delay}")
    if delay > MAX_DUE_MS or not abs(job.createTime or 0) <= MAX_DUE_MS:
        raise InvalidMessage("the due time is after the year 9999")
    return job


def outgoing_of(job: Job, now_ms: int, trace: Mapping[str, str]) -> tuple[str, Outgoing]:
    """Topic and message of a job. Without `createTime`, the delay starts at the server's time.

    trace: headers with the trace context of the request.
    """
    topic, delay = job.topic or "", job.delay or 0
    message_id = job.id or ":".join(filter(None, [topic, job.bizKey, new_id()]))
    headers = {
        MARK: str(now_ms if job.createTime is None else job.createTime),
        _DELAY: str(delay),
    }
    if job.ttl:
        headers[_TTL] = str(job.ttl)
    headers |= trace
    headers |= {
        name: value for name in ("subtopic", "bizKey") if (value := getattr(job, name)) is not None
    }
    if job.createTime is None:
        return topic, Outgoing(
            job.body, id=message_id, delay=timedelta(milliseconds=delay), headers=headers
        )
    at_ms = max(job.createTime + delay, OLDEST_DUE_MS)  # the original accepts any past time
    return topic, Outgoing(job.body, id=message_id, at_ms=at_ms, headers=headers)


def job_of(message: Message) -> dict[str, Any]:
    """A message in the original's job format, even if it was sent through another API."""
    headers = message.headers
    return {
        "topic": message.topic,
        "subtopic": headers.get("subtopic"),
        "id": message.id,
        "bizKey": headers.get("bizKey"),
        "delay": _number(headers, _DELAY, 0),
        "ttl": _number(headers, _TTL, 0),
        "body": None if message.body is None else text_of(message.body),
        "createTime": _number(headers, MARK, message.due_ms),
        "status": READY,
        "buckedName": None,  # the original's spelling
    }


def _number(headers: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(headers[name])
    except (KeyError, ValueError):
        return default


def _encode(*, success: bool, code: int, data: Any = None, message: str | None = None) -> bytes:
    """A response with all fields of the original's serialiser."""
    return msgspec.json.encode(
        {
            "success": success,
            "data": data,
            "message": message,
            "code": code,
            "includes": None,
            "excludes": None,
            "onlyData": False,
            "callback": None,
        }
    )


def _success(data: Any = None) -> Response:
    return Response(_encode(success=True, code=200, data=data), media_type="application/json")


def _failure(_request: Request, problem: ErrorResponse) -> Response:
    code = problem.status if problem.status in (401, 403) else 500
    return failed(problem, _encode(success=False, code=code, message=problem.detail))


def clear(store: Store, topics: Iterable[str]) -> Flow[int]:
    """Cancel this API's messages in the topics; returns the number of cancelled messages."""
    total = 0
    for topic, state in product(topics, STATES):
        cursor: str | None = None
        while True:
            page = yield from list_messages(store, topic, state, cursor=cursor, limit=PAGE)
            total += yield from _cancel(store, topic, list({row.id: None for row in page.rows}))
            cursor = page.cursor
            if cursor is None:
                break
    return total


def _cancel(store: Store, topic: str, ids: list[str]) -> Flow[int]:
    seen = (yield from store.run_by_id(Inspect(topic, ids))) if ids else []
    messages = map(partial(found, topic), ids, seen)
    own = [message.id for message in messages if message and MARK in message.headers]
    outcomes = (yield from store.run_by_id(Cancel(topic, own))) if own else []
    return sum(outcome is Cancelled.CANCELLED for outcome in outcomes)


class _Report(msgspec.Struct):
    counts: dict[str, int]


async def restore(gateway: GatewayContext, options: Sequence[str]) -> dict[str, int]:
    """Restore jobs from the archive in another process; returns counts by outcome.

    Raises ConfigError or ErrorResponse.
    """
    archive = gateway.settings.gateway_server.archive
    if archive is None:
        raise ConfigError(
            "no archive is configured: start the gateway with --archive DIR, "
            "or set gateway-server.archive"
        )
    if "://" in archive:
        raise ConfigError(f"to restore from {archive}, run lisa pipeline restore")
    from lisa.pipeline.source.options import as_url

    folder = os.path.abspath(archive)  # noqa: ASYNC240, PTH100  no file is read
    command = ["--json", "pipeline", "restore", "--archive", folder]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LISA_")}
    with tempfile.TemporaryDirectory(prefix="lisa-restore-", dir=writable_folder()) as directory:
        process = await asyncio.create_subprocess_exec(
            *python("lisa.cli.main", *command, "--report", f"{directory}/report", *options),
            # Not in the command line, because the address may contain a password.
            env={
                **clean,
                "LISA_REDIS_URL": as_url(gateway.address),
                "LISA_PREFIX": gateway.store.keys.prefix,
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # so that the Java child process can be killed too
        )
        try:
            async with asyncio.timeout(WITHIN_S):
                out, err = await process.communicate()
        except TimeoutError:
            raise _not_restored(f"it took more than {WITHIN_S:g} s and was killed") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    try:
        return msgspec.json.decode(out, type=_Report).counts
    except msgspec.DecodeError:
        lines = err.decode("utf-8", "replace").strip().splitlines() or ["no error output"]
        raise _not_restored(lines[-1][:SHOWN]) from None


def _not_restored(reason: str) -> ErrorResponse:
    return ErrorResponse(409, "restore-failed", f"the restore failed: {reason}")


__all__ = ["routes"]


def routes(gateway: GatewayContext) -> list[BaseRoute]:
    """All paths below `/mykit`."""
    handlers = _Handlers(gateway)
    return [
        Route(PREFIX + path, answering(handler, _failure), methods=[method])
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


class _Handlers:
    def __init__(self, gateway: GatewayContext) -> None:
        self._gateway = gateway
        self._restoring = asyncio.Lock()

    async def push(self, request: Request) -> Response:
        job = read_job(await request.body())
        self._gateway.require(request, Scope.PRODUCE, job.topic, compat=True)
        trace = trace_context(request.headers)
        topic, message = outgoing_of(job, self._gateway.clock.about_ms(), trace)
        sent = await self._gateway.sender.offer(topic, message, OnDuplicate.KEEP_LIVE)
        return _success(sent.id)

    async def delete(self, request: Request) -> Response:
        job = await self._find(request, Scope.PRODUCE)
        outcome = await self._gateway.sender.cancel(job.topic, _id(request))
        if outcome is not Cancelled.CANCELLED:
            raise _conflict(f"job {_id(request)!r} cannot be deleted: it is {outcome}")
        record_change(self._gateway, request, "mykit.delete", topic=job.topic, id=_id(request))
        return _success()

    async def finish(self, request: Request) -> Response:
        job = await self._find(request, Scope.CONSUME)
        message_id = _id(request)
        state = job.message.state
        if state is State.ACKED:
            return _success()
        if await self._gateway.settler.ack_by_id(job.topic, message_id) is None:
            # The consumer was too slow: the job was reclaimed and waits for its next attempt.
            was_out = any(group.attempts for group in job.message.groups.values())
            late = job.is_own and was_out and state in (State.READY, State.RETRY)
            if not late or await self._gateway.sender.cancel(job.topic, message_id) != "cancelled":
                raise _conflict(f"job {message_id!r} is not in flight: it is {state}")
        return _success()

    async def get(self, request: Request) -> Response:
        topic: str = request.path_params["topic"]
        token = self._gateway.require(request, Scope.CONSUME, topic, compat=True)
        wait_ms = _wait_ms(request)

        def render(deliveries: list[HandedOut]) -> bytes:
            job = job_of(deliveries[0].message) if deliveries else None
            return _encode(success=True, code=200, data=job)

        pull = self._gateway.broker.pull(
            topic,
            group=request.query_params.get("group"),
            wait_s=wait_ms / 1000,
            may_declare=token.allows(Scope.OPERATE, topic),
        )
        return await hold(self._gateway, request, pull, render)

    async def restore_job(self, request: Request) -> Response:
        message_id = _id(request)
        try:
            job: FoundJob | None = await self._find(request, Scope.OPERATE)
        except ErrorResponse:
            job = None
        if job is not None and not job.message.state.is_final:
            groups = job.message.groups.items()
            for group in [name for name, held in groups if held.state is State.GARBAGE]:
                await self._gateway.ask(requeue, job.topic, group, [message_id])
                details = {"topic": job.topic, "group": group, "id": message_id}
                record_change(self._gateway, request, "mykit.reStoreJob", **details)
            return _success()
        self._gateway.require(request, Scope.OPERATE, compat=True)
        counts = await self._restore(["--id", message_id, "--expire"])
        if not counts.get("restored"):
            raise _conflict(
                f"Job不存在! job {message_id!r} was not restored from the archive: {counts}"
            )
        record_change(self._gateway, request, "mykit.reStoreJob", id=message_id)
        return _success()

    async def restore(self, request: Request) -> Response:
        self._gateway.require(request, Scope.OPERATE, compat=True)
        expire = request.query_params.get("expire", "true").lower()
        if expire not in ("true", "false"):
            raise InvalidMessage(f"expire must be true or false, not {expire!r}")
        began = time.monotonic()
        counts = await self._restore(["--expire"] if expire == "true" else [])
        restored = counts.get("restored", 0)
        record_change(self._gateway, request, "mykit.reStore", done=restored)
        return _success(_report(began, "恢复", restored))

    async def _restore(self, options: Sequence[str]) -> dict[str, int]:
        """Restore jobs, one call at a time. Raises Crowded besides the errors of `restore`."""
        if self._restoring.locked():
            raise Crowded("a restore is already running")
        async with self._restoring:
            return await restore(self._gateway, options)

    async def clear_all(self, request: Request) -> Response:
        token = self._gateway.require(request, Scope.OPERATE, compat=True)
        if not self._gateway.settings.gateway_server.mykit_clear_all:
            raise ConfigError(
                "clearAll is disabled; set gateway-server.mykit-clear-all: true to enable it"
            )
        began, store = time.monotonic(), self._gateway.store
        topics = [topic for topic in await store.drive(store.topics()) if token.sees(topic)]
        total = await self._gateway.ask(clear, topics)
        record_change(self._gateway, request, "mykit.clearAll", done=total)
        return _success(_report(began, "删除", total))

    async def _find(self, request: Request, scope: Scope) -> FoundJob:
        """The job with the request's id. Raises ErrorResponse if there is none."""
        message_id, topic = _id(request), request.query_params.get("topic")
        job = await find_job(
            self._gateway, request, scope, message_id, topic, mark=MARK, is_likely=_may_be_of
        )
        if job is None:
            raise ErrorResponse(404, "unknown", f"there is no job {message_id!r}")
        return job


def _may_be_of(topic: str, message_id: str) -> bool:
    """Whether an id begins with a topic, as generated ids do."""
    return message_id.startswith(f"{topic}:")


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
