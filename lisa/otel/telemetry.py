"""The middleware that creates spans and metrics."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from opentelemetry import context as contexts
from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import Meter, MeterProvider
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider

import lisa
from lisa.core.model.message import Message
from lisa.core.model.outcomes import Defer, meant_to_be_raised
from lisa.middleware import Middleware

if TYPE_CHECKING:
    from lisa.consumer import Batch, Settled
    from lisa.producer import SendCall, SendOutcome


SYSTEM = "messaging.system"
OPERATION_NAME = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
DESTINATION = "messaging.destination.name"
GROUP = "messaging.consumer.group.name"
MESSAGE_ID = "messaging.message.id"
BATCH_COUNT = "messaging.batch.message_count"
ERROR_TYPE = "error.type"
ATTEMPT = "messaging.lisa.message.delivery_attempt"
OUTCOME = "messaging.lisa.outcome"
DEFERRED = "deferred"

DURATION_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""The bucket bounds that the conventions recommend."""

LATENESS_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60, 3600)

Attributes = dict[str, str | int]


LOOK_AGAIN_S = 1.0
"""How often to check whether the application has set up an SDK."""


RETURNED_FALSE = "returned_false"
"""The `error.type` of a handler that returned False."""


def attributes_of(
    operation: str, kind: str, topic: str, group: str | None = None, error: str | None = None
) -> Attributes:
    """The attributes that spans and metrics of an operation share. `kind`: the operation type."""
    found: Attributes = {
        SYSTEM: "lisa",
        OPERATION_NAME: operation,
        OPERATION_TYPE: kind,
        DESTINATION: topic,
    }
    if group is not None:
        found[GROUP] = group
    if error is not None:
        found[ERROR_TYPE] = error
    return found


def error_type(error: BaseException) -> str:
    """The value of `error.type` for an exception."""
    return type(error).__qualname__


class Instruments:
    """The metric instruments."""

    def __init__(self, meter: Meter) -> None:
        self.sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages that a producer tried to send."
        )
        self.consumed = meter.create_counter(
            "messaging.client.consumed.messages",
            "{message}",
            "Messages that were delivered to handlers.",
        )
        self.operations = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "Duration of sends and settlements.",
            explicit_bucket_boundaries_advisory=DURATION_BOUNDS_S,
        )
        self.handlers = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of handlers.",
            explicit_bucket_boundaries_advisory=DURATION_BOUNDS_S,
        )
        self.lateness = meter.create_histogram(
            "lisa.message.lateness",
            "s",
            "Time from the due time to the start of the handler, at the first attempt.",
            explicit_bucket_boundaries_advisory=LATENESS_BOUNDS_S,
        )


Outcomes: TypeAlias = "Sequence[SendOutcome]"


class Telemetry(Middleware):
    """Traces and measures sends, handlers and settlements, in any producer or consumer.

    A send puts its trace context into the headers of its messages. The span of a handler starts a
    new trace that links to the send, because a message may be due days later.

    parent: also make the handler's span a child of the send's span, in one trace. Not for batches.
    settle_spans: whether to create spans for settlements.
    tracer_provider, meter_provider: by default the global ones.
    """

    def __init__(
        self,
        *,
        parent: bool = False,
        settle_spans: bool = True,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        self._parent = parent
        self._settle_spans = settle_spans
        self._tracer = trace.get_tracer("lisa.otel", lisa.__version__, tracer_provider)
        self._instruments = Instruments(
            metrics.get_meter("lisa.otel", lisa.__version__, meter_provider)
        )
        self._providers = tracer_provider, meter_provider
        self._is_on = False
        self._look_at = 0.0

    def is_idle(self) -> bool:
        """Whether no SDK is installed; a send then costs the same as without `Telemetry`."""
        return not (self._is_on or self._looks_on())

    def send(
        self, call: SendCall, call_next: Callable[[SendCall], Sequence[SendOutcome]]
    ) -> Sequence[SendOutcome]:
        """Trace a send."""
        if self.is_idle():
            return call_next(call)
        with self._sending(call) as take:
            return take(call_next(call))

    async def send_async(
        self, call: SendCall, call_next: Callable[[SendCall], Awaitable[Sequence[SendOutcome]]]
    ) -> Sequence[SendOutcome]:
        """Trace a send of an `AsyncProducer`."""
        if self.is_idle():
            return await call_next(call)
        with self._sending(call) as take:
            return take(await call_next(call))

    def handle(self, given: Any, call_next: Callable[[Any], Any]) -> Any:
        """Trace a handler, or a batch handler."""
        if self.is_idle():
            return call_next(given)
        with self._handling(given) as take:
            return take(call_next(given))

    async def handle_async(self, given: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
        """Trace an `async def` handler, or batch handler."""
        if self.is_idle():
            return await call_next(given)
        with self._handling(given) as take:
            return take(await call_next(given))

    handle_batch = handle  # type: ignore[assignment]  # it takes both
    handle_batch_async = handle_async  # type: ignore[assignment]  # as above

    def settled(self, settled: Settled) -> None:
        """Record a finished settlement."""
        if self.is_idle():
            return
        error = None if settled.error is None else error_type(settled.error)
        attributes = attributes_of(settled.operation, "settle", settled.topic, settled.group, error)
        self._instruments.operations.record(settled.seconds, attributes)
        if not self._settle_spans:
            return
        ended_ns = round(settled.ended * 1e9)
        span = self._tracer.start_span(
            f"{settled.operation} {settled.topic}",
            Context(),
            SpanKind.CLIENT,
            attributes | _count(len(settled.messages)),
            _links(settled.messages),
            ended_ns - round(settled.seconds * 1e9),
        )
        if settled.error is not None:
            span.set_status(Status(StatusCode.ERROR, str(settled.error)))
        span.end(ended_ns)

    def _looks_on(self) -> bool:
        """Whether there is an SDK. Checks at most once per second until there is one."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_AGAIN_S
            self._is_on = _has_sdk(*self._providers)
        return self._is_on

    @contextmanager
    def _sending(self, call: SendCall) -> Iterator[Callable[[Outcomes], Outcomes]]:
        """The span of a send. Yields a function that takes the outcomes and returns them."""
        given = _link(call.headers)
        attributes = attributes_of("send", "send", call.topic)
        count = len(call)
        span = self._tracer.start_span(
            f"send {call.topic}",
            kind=SpanKind.CLIENT if given else SpanKind.PRODUCER,
            attributes=attributes | _count(count),
            links=[given] if given else [],
        )

        def take(outcomes: Outcomes) -> Outcomes:
            if count == 1 and outcomes:
                span.set_attribute(MESSAGE_ID, outcomes[0].id)
            return outcomes

        began = time.monotonic()
        try:
            with _current(span):
                if not given:  # a message keeps a context that the application gave it
                    _inject(call)
                yield take
        except BaseException as error:
            attributes = {**attributes, ERROR_TYPE: error_type(error)}
            raise
        finally:
            self._instruments.operations.record(time.monotonic() - began, attributes)
            self._instruments.sent.add(count, attributes)

    @contextmanager
    def _handling(self, given: Message | Batch) -> Iterator[Callable[[Any], Any]]:
        """The span of a handler. Yields a function that takes the result and returns it."""
        messages: Sequence[Message] = [given] if isinstance(given, Message) else given
        in_batches, first = messages is given, messages[0]
        attributes = attributes_of("process", "process", first.topic, first.group)
        self._instruments.consumed.add(len(messages), attributes)
        self._record_lateness(messages)
        own = _count(len(messages)) if in_batches else _identity(first)
        # The consumer's own context did not cause the message, so it is ignored.
        parent = Context() if in_batches else propagate.extract(first.headers, Context())
        span = self._tracer.start_span(
            f"process {first.topic}",
            parent if self._parent else trace.set_span_in_context(trace.INVALID_SPAN, parent),
            SpanKind.CONSUMER,
            attributes | own,
            _links(messages),
        )

        def take(result: Any) -> Any:
            nonlocal attributes
            error = meant_to_be_raised(result)
            if isinstance(error, Defer):
                span.set_attribute(OUTCOME, DEFERRED)
            elif result is False or error is not None:
                shown = "False" if error is None else error_type(error)
                kind = RETURNED_FALSE if error is None else shown
                attributes = {**attributes, ERROR_TYPE: kind}
                span.set_attribute(ERROR_TYPE, kind)
                span.set_status(Status(StatusCode.ERROR, f"the handler returned {shown}"))
            return result

        began = time.monotonic()
        try:
            with _current(span, parent):
                yield take
        except BaseException as error:
            if _is_failure(error):
                attributes = {**attributes, ERROR_TYPE: error_type(error)}
            raise
        finally:
            self._instruments.handlers.record(time.monotonic() - began, attributes)

    def _record_lateness(self, messages: Sequence[Message]) -> None:
        now = time.time()
        for message in messages:
            if message.attempt == 1:
                attributes = {DESTINATION: message.topic, GROUP: message.group}
                self._instruments.lateness.record(max(0.0, now - message.due_ms / 1000), attributes)


@contextmanager
def _current(span: Span, context: Context | None = None) -> Iterator[None]:
    """Make a span current in a context, then end it; records a raised error, or a `Defer`."""
    token = contexts.attach(trace.set_span_in_context(span, context))
    try:
        yield
    except BaseException as error:
        if not _is_failure(error):
            span.set_attribute(OUTCOME, DEFERRED)
            raise
        span.record_exception(error)
        span.set_attribute(ERROR_TYPE, error_type(error))
        span.set_status(Status(StatusCode.ERROR, str(error)))
        raise
    finally:
        contexts.detach(token)
        span.end()


def _is_failure(error: BaseException) -> bool:
    """Whether a raised error is a failure; a `Defer`, also in an exception group, is not."""
    if not isinstance(error, (Defer, BaseExceptionGroup)):
        return True
    from lisa.consumer.inflight import verdict_of  # late: producers do not need consumers

    return not verdict_of(error).is_deferral


def _has_sdk(tracers: TracerProvider | None, meters: MeterProvider | None) -> bool:
    """Whether a provider is from an SDK; those of the API do nothing."""
    found = tracers or trace.get_tracer_provider(), meters or metrics.get_meter_provider()
    of_api = ("opentelemetry.trace", "opentelemetry.metrics")
    return any(not type(provider).__module__.startswith(of_api) for provider in found)


def _inject(call: SendCall) -> None:
    """Put the current context into the headers of messages that have none."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    for name, value in carrier.items():
        call.set_header(name, value, replace=False)


def _count(count: int) -> Attributes:
    return {} if count == 1 else {BATCH_COUNT: count}


def _identity(message: Message) -> Attributes:
    return {MESSAGE_ID: message.id, ATTEMPT: message.attempt}


def _links(messages: Sequence[Message]) -> list[Link]:
    """Links to the sends of messages."""
    links = (_link(message.headers, {MESSAGE_ID: message.id}) for message in messages)
    return [link for link in links if link is not None]


def _link(headers: Mapping[str, str], attributes: Attributes | None = None) -> Link | None:
    """A link to the context in the headers, if there is one."""
    if not headers:
        return None
    context = trace.get_current_span(propagate.extract(headers, Context())).get_span_context()
    return Link(context, attributes) if context.is_valid else None
