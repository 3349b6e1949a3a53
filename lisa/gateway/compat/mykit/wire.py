"""mykit-delay's forms: its jobs and its answers."""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec
from starlette.responses import Response

from lisa.core.clock import MAX_DUE_MS
from lisa.core.envelope import new_id
from lisa.core.errors import InvalidMessage
from lisa.core.message import Message
from lisa.gateway.problems import problem_of
from lisa.producer import Outgoing

__all__ = ["MARK", "PREFIX", "job_of", "outgoing_of", "read_job", "refused", "said", "topics_in"]

log = logging.getLogger("lisa.gateway")

PREFIX = "/mykit"
MARK = "mykit-create-time"
"""The header that every message of this face has."""

_DELAY, _TTL = "mykit-delay", "mykit-ttl"
READY = 2
"""Its status of a job that is due, the only one in which a job is handed out."""

PUSHABLE = (0, 5)
"""WaitPut and Restore."""


class Job(msgspec.Struct, kw_only=True):
    """A job as it is pushed; fields that it does not have are passed over, null is as none."""

    topic: str | None = None
    subtopic: str | None = None
    id: str | None = None
    bizKey: str | None = None  # noqa: N815  the name on the wire
    delay: int | None = None
    ttl: int | None = None
    body: str | None = None
    createTime: int | None = None  # noqa: N815  as above
    status: int | None = None


_decoder = msgspec.json.Decoder(Job, strict=False)


def read_job(data: bytes) -> Job:
    """A job from a request's body. Raises InvalidMessage."""
    try:
        job = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidMessage(f"the request's body is no job: {error}") from None
    if not job.topic:
        raise InvalidMessage("参数topic错误: a job names its topic")
    if (job.status or 0) not in PUSHABLE:
        raise InvalidMessage(f"a job is pushed with status 0 or 5, not {job.status}")
    delay = job.delay or 0
    if delay < 0:
        raise InvalidMessage(f"a delay is 0 or more milliseconds, not {delay}")
    if delay > MAX_DUE_MS or not abs(job.createTime or 0) <= MAX_DUE_MS:
        raise InvalidMessage("the job is due beyond the year 9999")
    return job


def outgoing_of(job: Job, now_ms: int) -> tuple[str, Outgoing]:
    """Topic and message of a job. Without `createTime` its delay counts by the server's clock."""
    topic, delay = job.topic or "", job.delay or 0
    message_id = job.id or ":".join(filter(None, [topic, job.bizKey, new_id()]))
    headers = {
        MARK: str(now_ms if job.createTime is None else job.createTime),
        _DELAY: str(delay),
    }
    if job.ttl:
        headers[_TTL] = str(job.ttl)
    headers |= {name: value for name in ("subtopic", "bizKey")
                if (value := getattr(job, name)) is not None}  # fmt: skip
    if job.createTime is None:
        return topic, Outgoing(
            job.body, id=message_id, delay=timedelta(milliseconds=delay), headers=headers
        )
    at_ms = job.createTime + delay
    return topic, Outgoing(job.body, id=message_id, at_ms=at_ms, headers=headers)


def job_of(message: Message) -> dict[str, Any]:
    """A message as the job that it was; one that came another way is made to look like one."""
    headers = message.headers
    return {
        "topic": message.topic,
        "subtopic": headers.get("subtopic"),
        "id": message.id,
        "bizKey": headers.get("bizKey"),
        "delay": _number(headers, _DELAY, 0),
        "ttl": _number(headers, _TTL, 0),
        "body": _text(message.body),
        "createTime": _number(headers, MARK, message.due_ms),
        "status": READY,
        "buckedName": None,
    }


def _number(headers: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(headers[name])
    except (KeyError, ValueError):
        return default


def _text(body: Any) -> str | None:
    if body is None or isinstance(body, str):
        return body
    if isinstance(body, bytes):
        return base64.b64encode(body).decode("ascii")
    return msgspec.json.encode(body).decode()


def topics_in(message_id: str) -> list[str]:
    """The topics that an id may begin with: those made here do, and topics may hold colons."""
    parts = message_id.split(":")
    return [":".join(parts[:end]) for end in range(1, min(len(parts), 32))]


def _encode(*, success: bool, code: int, data: Any = None, message: str | None = None) -> bytes:
    """The answer with all the fields that the original's serializer writes."""
    return msgspec.json.encode({
        "success": success, "data": data, "message": message, "code": code,
        "includes": None, "excludes": None, "onlyData": False, "callback": None,
    })  # fmt: skip


def said(data: Any = None) -> bytes:
    """Success."""
    return _encode(success=True, code=200, data=data)


def refused(error: Exception) -> Response:
    """An error in this system's words.

    The original answers HTTP 200 whatever happened, and so does this for what a client did wrong;
    what stands between client and queue (tokens, bounds, a server that is away) keeps its status.
    """
    problem = problem_of(error)
    status = 200 if problem.status in (400, 404, 409) else problem.status
    code = problem.status if problem.status in (401, 403) else 500
    content = _encode(success=False, code=code, message=problem.detail)
    return Response(content, status, problem.headers, "application/json")
