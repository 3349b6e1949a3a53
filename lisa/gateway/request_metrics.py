"""Counters and histograms of one gateway process's requests and pushes."""

from __future__ import annotations

import time
from contextvars import ContextVar

from starlette.types import Message, Scope

from lisa.core.metrics.families import STEP_SECONDS
from lisa.core.metrics.numbers import Numbers, Spread, Tally, put

GONE = "499"
"""Status for a request whose client disconnected before the response (nginx's code)."""

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_FACES = (
    ("/v1", "native"),
    ("/lisa.v1.Lisa", "grpc"),
    ("/camellia", "camellia"),
    ("/mykit", "mykit"),
    ("/delay-queue", "delay-queue"),
    ("/metrics", "metrics"),
    ("/healthz", "health"),
)
_WAITS = "lisa.waits"


class RequestOutcome:
    """The result of one request. `reason` explains a 503: "server", or the limit reached."""

    __slots__ = ("began", "code", "is_stream", "reason")

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.code = GONE
        self.is_stream = False
        self.reason = "server"

    def starts(self, message: Message) -> None:
        """Record the head of the response."""
        self.code = str(message["status"])
        self.is_stream = any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in message.get("headers", ())
        )


_current: ContextVar[RequestOutcome | None] = ContextVar("outcome", default=None)


def set_failure_reason(reason: str) -> None:
    """Record which limit the current request reached, in case its response is 503."""
    outcome = _current.get()
    if outcome is not None:
        outcome.reason = reason


def waits(scope: Scope) -> None:
    """Exclude a request from the latency histogram, because it waits for messages."""
    scope[_WAITS] = True


def is_pull(scope: Scope) -> bool:
    """Whether a request waits for messages (see `waits`)."""
    return _WAITS in scope


class Meter:
    """Counters and histograms of one process."""

    def __init__(self) -> None:
        self.pushes = Tally()
        self.malformed = 0
        self._requests = Tally()
        self._refused = Tally()
        self._seconds: dict[str, Spread] = {}
        for reason in ("requests", "bytes", "waiting", "server"):
            self._refused.add(0, reason)

    def begin(self) -> RequestOutcome:
        """Start measuring a request."""
        outcome = RequestOutcome()
        _current.set(outcome)
        return outcome

    def end(self, scope: Scope, outcome: RequestOutcome) -> None:
        """Count a finished request."""
        face = face_of(scope["path"])
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._requests.add(1, face, method, outcome.code)
        if outcome.code == "503":
            self._refused.add(1, outcome.reason)
        if not outcome.is_stream and _WAITS not in scope:
            spread = self._seconds.get(face)
            if spread is None:
                spread = self._seconds[face] = Spread(STEP_SECONDS)
            spread.observe(time.monotonic() - outcome.began)

    def numbers(self) -> Numbers:
        """All metrics of this object."""
        numbers: Numbers = {
            "lisa_gateway_requests_total": self._requests.numbers(),
            "lisa_gateway_refused_total": self._refused.numbers(),
            "lisa_gateway_pushes_total": self.pushes.numbers(),
        }
        put(numbers, "lisa_gateway_malformed_total", self.malformed)
        for face, spread in list(self._seconds.items()):
            put(numbers, "lisa_gateway_request_seconds", spread.numbers(), face)
        return numbers


def face_of(path: str) -> str:
    """The value of the metric label `face` for a path."""
    for root, face in _FACES:
        if path == root or path.startswith(f"{root}/"):
            return face
    return "page"
