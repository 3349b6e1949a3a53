"""The send channel of one request, which counts stalled responses and large bodies in memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

from starlette.types import Message, Scope, Send

from lisa.gateway.context import GatewayContext
from lisa.gateway.problems import problem_of
from lisa.gateway.request_metrics import RequestOutcome, face_of, is_pull
from lisa.gateway.shares import Client, Crowded, Holding

LARGE_BYTES = 64 * 1024
"""Response bodies above this size count as buffered, and are written in parts of this size.

Uvicorn waits between two writes until the client reads, but not after the last one.
"""

SAFE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)


class ResponseChannel:
    """An ASGI send channel that adds default security headers and records the response's head.

    A large response to GET becomes 503 if it does not fit into the limit on buffered bytes, or into
    the client's share.
    Metrics are only counted, since they show the limit. So are responses to other methods, whose
    requests may have changed something. Pulls are counted by their response (see `long_poll`).
    """

    def __init__(
        self,
        hub: GatewayContext,
        client: Client,
        scope: Scope,
        send: Send,
        outcome: RequestOutcome,
    ) -> None:
        self._shares = hub.shares
        self._scope = scope
        self._send = send
        self._outcome = outcome
        self._held = Holding(hub.shares.buffered, client)
        self._is_refused = False

    async def __call__(self, message: Message) -> None:
        """Send a message. A response that waits until its client reads counts as stalled."""
        if self._is_refused:
            return
        if message["type"] == "http.response.start":
            size = content_length(message.get("headers", ()))
            if size > LARGE_BYTES and not is_pull(self._scope):
                self._held.grow(size)
                try:
                    if self._may_refuse():
                        self._held.check()
                except Crowded as error:
                    self._held.end()
                    await self._refuse(error)
                    return
            message = _with_headers(message)
            self._outcome.starts(message)
        for part in self._parts(message):
            await self._pass(part)

    def close(self) -> None:
        """Stop counting the body, which is written but for its last part."""
        self._held.end()

    def _may_refuse(self) -> bool:
        return self._scope["method"] == "GET" and face_of(self._scope["path"]) != "metrics"

    def _parts(self, message: Message) -> Iterable[Message]:
        body: bytes = message.get("body", b"")
        if len(body) <= LARGE_BYTES or self._scope.get("http_version") == "2":  # gRPC waits itself
            return [message]
        starts = range(0, len(body), LARGE_BYTES)
        is_last_of_all = not message.get("more_body", False)
        return (
            {
                **message,
                "body": body[start : start + LARGE_BYTES],
                "more_body": not (is_last_of_all and start == starts[-1]),
            }
            for start in starts
        )

    async def _refuse(self, error: Crowded) -> None:
        async def receive() -> Message:
            return {"type": "http.disconnect"}

        await problem_of(error).response()(self._scope, receive, self)
        self._is_refused = True

    async def _pass(self, message: Message) -> None:
        # A stream is counted as such. Calls of gRPC have no connections of their own to wait on.
        is_counted = self._outcome.is_stream or self._scope.get("http_version") == "2"
        with nullcontext() if is_counted else self._shares.stalling():
            await self._send(message)


def content_length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """The length of a body by its headers; 0 if they do not tell it."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


def _with_headers(message: Message) -> Message:
    headers = list(message.get("headers", ()))
    known = {name.lower() for name, _ in headers}
    headers += [pair for pair in SAFE_HEADERS if pair[0] not in known]
    return {**message, "headers": headers}
