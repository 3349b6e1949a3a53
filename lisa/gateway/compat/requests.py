"""What the compatible APIs share: forms, answers and jobs found by their ids alone."""

from __future__ import annotations

import base64
import re
from collections.abc import Awaitable, Callable, Sequence
from email.message import Message
from email.parser import BytesHeaderParser
from email.utils import collapse_rfc2231_value
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lisa.admin.search import topics_with
from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import check_id
from lisa.core.store.inspection import FoundMessage, State, found
from lisa.gateway import audit
from lisa.gateway.access import Forbidden, Scope
from lisa.gateway.context import ROLE, GatewayContext
from lisa.gateway.limits import reject_foreign
from lisa.gateway.problems import ClientDisconnected, ErrorResponse, problem_of

FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"
MOST_FIELDS = 100
MOST_HEAD_BYTES = 1_024
"""Length of the headers of one part, which take quadratic time to parse."""


async def read_form(request: Request, *, default: str = "") -> list[tuple[str, str]]:
    """Names and values of a form in the body, in order; empty if the body is not a form.

    Spring's RestTemplate sends a multipart form if any value is not text. Uploaded files are
    ignored. default: the content type of a request that names none. Raises ValueError.
    """
    given = request.headers.get("content-type", default)
    kind = given.partition(";")[0].strip().lower()
    if kind == FORM:
        text = (await request.body()).decode("utf-8", "replace")
        return parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_FIELDS)
    if kind == MULTIPART:
        return _parts(given, await request.body())
    return []


def _parts(content_type: str, body: bytes) -> list[tuple[str, str]]:
    """The fields of a multipart form. Nested forms are not parsed, because that may take long.

    Raises ValueError.
    """
    if len(content_type) > MOST_HEAD_BYTES:
        raise ValueError("the content type is too long")
    whole = Message()
    whole["content-type"] = content_type
    boundary = _param(whole, "boundary", "content-type")
    if not boundary:
        raise ValueError("the multipart form has no boundary")
    limit = rb"\r\n--%s(?=--|[ \t]*\r\n)" % re.escape(boundary.encode("latin-1"))
    found = []
    parts = re.split(limit, b"\r\n" + body, maxsplit=MOST_FIELDS + 2)[1:]
    if not parts:
        raise ValueError("the multipart form has no parts")
    for number, part in enumerate(parts):
        if part.startswith(b"--"):  # the end
            break
        if number == MOST_FIELDS:
            raise ValueError("Max number of fields exceeded")
        head, _, content = part.partition(b"\r\n\r\n")
        if len(head) > MOST_HEAD_BYTES:
            raise ValueError("the headers of a part are too long")
        fields = BytesHeaderParser().parsebytes(head.lstrip())
        name = _param(fields, "name", "content-disposition")
        if name is not None and _param(fields, "filename", "content-disposition") is None:
            found.append((name, content.decode("utf-8", "replace")))
    return found


def _param(fields: Message, name: str, header: str) -> str | None:
    """A parameter of a header; None if it is missing. Raises ValueError."""
    try:
        value = fields.get_param(name, header=header)
    except TypeError as error:  # raised for continued parameters in a wrong order
        raise ValueError(f"the header {header} is invalid: {error}") from None
    return collapse_rfc2231_value(value) if value is not None else None


Handler = Callable[[Request], Awaitable[Response]]
Failure = Callable[[Request, ErrorResponse], Response]


def answering(handler: Handler, failure: Failure, *, changes: bool = True) -> Handler:
    """An endpoint whose errors `failure` answers in the original's format.

    changes: whether a request may change state, even on GET.
    """

    async def answer(request: Request) -> Response:
        try:
            if changes:
                if request.method == "HEAD":  # its response would discard a delivered job
                    raise ErrorResponse(405, "method", "HEAD is not supported here")
                reject_foreign(request.headers)
            return await handler(request)
        except ClientDisconnected:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001  answered in the original's format
            return failure(request, problem_of(error))

    return answer


def failed(problem: ErrorResponse, content: bytes) -> Response:
    """The response for an error, with the original's content.

    The originals always answer 200, and so do these APIs for client errors. Errors that the
    originals do not have (authentication, limits, outages) keep their status.
    """
    status = 200 if problem.status in (400, 404, 409) else problem.status
    return Response(content, status, problem.headers, "application/json")


def record_change(gateway: GatewayContext, request: Request, action: str, **details: Any) -> None:
    """Record a change in the audit log, as the native API does for its operations.

    Sends, pulls and settlements are left to the journal.
    """
    audit.changed(request, gateway.token(request, compat=True), action, **details)


def text_of(body: Any) -> str:
    """A message body as text: bytes in base64, JSON as encoded."""
    if isinstance(body, str):
        return body
    if isinstance(body, bytes):
        return base64.b64encode(body).decode("ascii")
    return msgspec.json.encode(body).decode()


class FoundJob(NamedTuple):
    """A message or tombstone found by its id. `is_own`: it was sent through the same API."""

    message: FoundMessage
    is_own: bool

    @property
    def topic(self) -> str:
        """The message's topic."""
        return self.message.topic

    @property
    def is_held(self) -> bool:
        """Whether the message is in flight through a gateway."""
        return any(
            group.state is State.IN_FLIGHT and (group.consumer or "").startswith(f"{ROLE}-")
            for group in self.message.groups.values()
        )


async def find_job(
    gateway: GatewayContext,
    request: Request,
    scope: Scope,
    message_id: str,
    topic: str | None,
    *,
    mark: str,
    is_likely: Callable[[str, str], bool],
) -> FoundJob | None:
    """Find the job with an id, in `topic` or else in all topics; None if there is none.

    Searches topics that are likely to have the id first, and prefers live jobs to settled ones.
    is_likely: whether a topic is, by the form of the id.
    With the scope `consume`, also accepts messages of other APIs that a gateway has delivered, with
    lower priority. Raises Unauthorized, Forbidden, InvalidMessage, or ConfigError if several topics
    have a live job.
    """
    if topic is not None:
        gateway.require(request, scope, topic, compat=True)
        parts: list[Sequence[str]] = [[topic]]
    else:
        token = gateway.token(request, compat=True)
        if not token.grants(scope):
            raise Forbidden(f"token {token.name!r} does not allow scope {scope}")
        known = await gateway.store.drive(gateway.store.topics())
        allowed = [topic for topic in known if token.allows(scope, topic)]
        parts = [[topic for topic in allowed if is_likely(topic, message_id)], allowed]
    check_id(message_id)
    settled: list[FoundJob] = []
    others: list[FoundJob] = []
    tried: set[str] = set()
    for part in parts:
        fresh = sorted(set(part) - tried)
        tried.update(fresh)
        jobs = await _jobs(gateway, message_id, mark, fresh)
        live = [job for job in jobs if not job.message.state.is_final]
        if own := _only([job for job in live if job.is_own], message_id):
            return own
        others += [job for job in live if job.is_held]
        settled += [job for job in jobs if job.message.state.is_final]
    held = _only(others, message_id) if scope is Scope.CONSUME else None
    return held or next(iter(settled), None)


def _only(live: list[FoundJob], message_id: str) -> FoundJob | None:
    if len(live) > 1:
        names = ", ".join(job.topic for job in live)
        raise ConfigError(f"id {message_id!r} exists in several topics ({names}); add topic=...")
    return live[0] if live else None


async def _jobs(
    gateway: GatewayContext, message_id: str, mark: str, topics: Sequence[str]
) -> list[FoundJob]:
    jobs = []
    for topic in await gateway.ask(topics_with, topics, message_id):
        message = found(topic, message_id, await gateway.settler.look(topic, message_id))
        if message is not None:
            is_own = message.state.is_final or mark in message.headers
            jobs.append(FoundJob(message, is_own))
    return jobs
