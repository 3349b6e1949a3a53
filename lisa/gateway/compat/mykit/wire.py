"""mykit-delay's JSON formats: jobs and responses."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec

from lisa.core.model.clock import MAX_DUE_MS, OLDEST_DUE_MS
from lisa.core.model.envelope import new_id
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.message import Message
from lisa.gateway.compat.answering import text_of
from lisa.gateway.problems import ErrorResponse
from lisa.producer import Outgoing

PREFIX = "/mykit"
MARK = "mykit-create-time"
"""The header that marks every message sent through this API."""

_DELAY, _TTL = "mykit-delay", "mykit-ttl"
READY = 2
"""The original's status of a due job; every delivered job has it."""

PUSHABLE = (0, 5)
"""The statuses that a pushed job may have: WaitPut and Restore."""


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


def topics_in(message_id: str) -> list[str]:
    """The topics with which an id may begin: generated ids do, and topics may contain colons."""
    parts = message_id.split(":")
    return [":".join(parts[:end]) for end in range(1, min(len(parts), 32))]


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


def success(data: Any = None) -> bytes:
    """The body of a successful response."""
    return _encode(success=True, code=200, data=data)


def failure(problem: ErrorResponse) -> bytes:
    """The body of an error response."""
    code = problem.status if problem.status in (401, 403) else 500
    return _encode(success=False, code=code, message=problem.detail)
