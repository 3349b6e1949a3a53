"""What one gateway process counts about its requests and deliveries."""

from __future__ import annotations

import time
from contextvars import ContextVar

from starlette.types import Message, Scope

from lisa.core.metrics.families import STEP_SECONDS
from lisa.core.metrics.numbers import Numbers, Spread, Tally, put

__all__ = ["GONE", "Answer", "Meter", "because", "waits"]

GONE = "499"
"""For a request that was not answered, since the client had left (nginx's code)."""

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_FACES = (
    ("/v1", "native"),
    ("/camellia", "camellia"),
    ("/mykit", "mykit"),
    ("/delay-queue", "delay-queue"),
    ("/metrics", "metrics"),
    ("/healthz", "health"),
)
_WAITS = "lisa.waits"


class Answer:
    """What became of one request; 503 is put down to the server unless something else is said."""

    __slots__ = ("began", "code", "is_stream", "reason")

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.code = GONE
        self.is_stream = False
        self.reason = "server"

    def starts(self, message: Message) -> None:
        """The head of the answer goes out."""
        self.code = str(message["status"])
        self.is_stream = any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in message.get("headers", ())
        )


_present: ContextVar[Answer | None] = ContextVar("answer", default=None)


def because(reason: str) -> None:
    """Say which bound the present request meets, should it be answered 503."""
    answer = _present.get()
    if answer is not None:
        answer.reason = reason


def waits(scope: Scope) -> None:
    """Say that a request waits for messages: its time says nothing of the gateway's."""
    scope[_WAITS] = True


class Meter:
    """Counters and histograms of one process."""

    def __init__(self) -> None:
        self.pushes = Tally()
        self._requests = Tally()
        self._refused = Tally()
        self._seconds: dict[str, Spread] = {}
        for reason in ("requests", "bytes", "waiting", "server"):
            self._refused.add(0, reason)
        for outcome in ("done", "later", "failed"):
            self.pushes.add(0, outcome)

    def begin(self) -> Answer:
        """A request has come."""
        answer = Answer()
        _present.set(answer)
        return answer

    def end(self, scope: Scope, answer: Answer) -> None:
        """It is over."""
        face = face_of(scope["path"])
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._requests.add(1, face, method, answer.code)
        if answer.code == "503":
            self._refused.add(1, answer.reason)
        if not answer.is_stream and _WAITS not in scope:
            spread = self._seconds.get(face)
            if spread is None:
                spread = self._seconds[face] = Spread(STEP_SECONDS)
            spread.observe(time.monotonic() - answer.began)

    def numbers(self) -> Numbers:
        """All of them."""
        numbers: Numbers = {
            "lisa_gateway_requests_total": self._requests.numbers(),
            "lisa_gateway_refused_total": self._refused.numbers(),
            "lisa_gateway_pushes_total": self.pushes.numbers(),
        }
        for face, spread in list(self._seconds.items()):
            put(numbers, "lisa_gateway_request_seconds", spread.numbers(), face)
        return numbers


def face_of(path: str) -> str:
    """The face that answers a path."""
    for root, face in _FACES:
        if path == root or path.startswith(f"{root}/"):
            return face
    return "page"
