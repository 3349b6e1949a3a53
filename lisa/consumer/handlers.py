"""The handlers of a topic: how they are checked, looked up, and called for a message or a batch.

Calls are flows, so that threads and the event loop share the same code. On a thread, the link of
`drive` is a function that waits for an awaitable.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NamedTuple, overload

import msgspec
from blinker import Signal

from lisa.consumer.inflight import RETURNED_FALSE, Held, Outcome, Verdict, combined, verdict_of
from lisa.core.model.callables import call_error, check_runs, function_name
from lisa.core.model.clock import parse_duration
from lisa.core.model.envelope import Envelope, decode_envelope
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.extras import requires
from lisa.core.model.keys import check_group, check_topic
from lisa.core.model.message import Body_co, Message
from lisa.core.model.middleware import HANDLE, BaseMiddleware, chain, methods
from lisa.core.model.outcomes import meant_to_be_raised
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.model.signals import Signals, everywhere
from lisa.core.redis.flow import Flow, drive

BodyDecoder = Callable[[Envelope], Any]


class BodyMismatch(InvalidMessage):
    """A body does not match its handler's model."""


def decoder_for(model: Any) -> BodyDecoder:
    """Return a function that decodes a body to `model`, or raises BodyMismatch with the reason.

    A model is a msgspec Struct, dataclass, TypedDict, pydantic model or any type that msgspec
    supports. JSON bodies are decoded; text and bytes bodies are converted from `str` and `bytes`.
    Raises ConfigError if `model` is not supported.
    """
    if hasattr(model, "__pydantic_core_schema__") or hasattr(model, "__get_pydantic_core_schema__"):
        return _pydantic(model)
    try:
        decoder = msgspec.json.Decoder(model)
    except TypeError as error:
        raise ConfigError(f"{_name(model)} cannot be a model: {error}") from None

    def read(envelope: Envelope) -> Any:
        try:
            if envelope.kind == "j":
                return decoder.decode(envelope.body)
            return msgspec.convert(_plain(envelope), model)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BodyMismatch(f"the body does not match {_name(model)}: {error}") from None

    return read


def _pydantic(model: Any) -> BodyDecoder:
    from pydantic import TypeAdapter, ValidationError

    adapter: TypeAdapter[Any] = TypeAdapter(model)
    # A producer writes a model by its fields' names, other programs by their aliases.
    has_names = "by_name" in inspect.signature(adapter.validate_json).parameters  # pydantic 2.11
    names: dict[str, Any] = {"by_alias": True, "by_name": True} if has_names else {}

    def read(envelope: Envelope) -> Any:
        try:
            if envelope.kind == "j":
                return adapter.validate_json(envelope.body, **names)
            return adapter.validate_python(_plain(envelope))
        except ValidationError as error:
            faults = error.errors(include_url=False, include_input=False)
            reasons = "; ".join(
                f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}" for fault in faults
            )
            raise BodyMismatch(f"the body does not match {_name(model)}: {reasons}") from None
        except UnicodeDecodeError as error:
            raise BodyMismatch(f"the body does not match {_name(model)}: {error}") from None

    return read


def _plain(envelope: Envelope) -> str | bytes:
    return envelope.body.decode() if envelope.kind == "s" else envelope.body


def _name(model: Any) -> str:
    return model.__name__ if inspect.isclass(model) else str(model)


LARGEST_BATCH = 10_000


def check_signature(topic: str, handler: object, *arguments: str) -> None:
    """Raise ConfigError if a handler cannot be called with these arguments, or is a generator."""
    if not callable(handler):
        raise ConfigError(f"the handler of topic {topic!r} is not callable: {handler!r}")
    if error := call_error(handler, *arguments):
        name = function_name(handler)
        count = "one positional argument" if len(arguments) == 1 else "two positional arguments"
        raise ConfigError(
            f"topic {topic!r}: the handler {name} must take {count}, the "
            f"{' and the '.join(arguments)}: {error}; define it as "
            f"{name.rpartition('.')[2]}({', '.join(arguments)}), and give other arguments "
            "defaults or bind them with functools.partial"
        )
    check_runs(handler)


def is_async_handler(function: Callable[..., Any]) -> bool:
    """Whether calling a handler returns a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  checks for a coroutine function
    )


def is_success(result: object) -> bool:
    """Whether a value that a handler returned counts as success.

    Raises ConfigError for a coroutine, whose code would run after the handler's transaction.
    """
    if inspect.iscoroutine(result):
        result.close()
        raise ConfigError("the handler returned a coroutine; define it with `async def`")
    return _outcome_of_result(result) is None


def checked_batch(topic: str, batch: int | None, within: object) -> int | None:
    """The size of a batch. Raises ConfigError if an option is invalid."""
    if batch is None:
        if within is not None:
            raise ConfigError(f"topic {topic!r}: within= needs batch=")
        return None
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= LARGEST_BATCH:
        raise ConfigError(f"topic {topic!r}: batch={batch!r} must be from 1 to {LARGEST_BATCH}")
    return batch


def checked_retry(topic: str, value: object) -> RetryPolicy:
    """The pauses between attempts. Raises ConfigError."""
    try:
        return RetryPolicy.parse(value)
    except ValueError as error:
        raise ConfigError(f"topic {topic!r}: retry: {error}") from None


def checked_concurrency(topic: str, value: int | None) -> int | None:
    """The most handlers at the same time. Raises ConfigError."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"topic {topic!r}: concurrency={value!r} must be a number from 1")
    return value


def checked_seconds(topic: str, name: str, value: timedelta | str | None) -> float | None:
    """A duration in seconds. Raises ConfigError."""
    if value is None:
        return None
    try:
        seconds = parse_duration(value).total_seconds()
    except ValueError as error:
        raise ConfigError(f"topic {topic!r}: {name}: {error}") from None
    if name == "timeout" and seconds == 0:
        raise ConfigError(f"topic {topic!r}: timeout must be above 0")
    return seconds


DEFAULT_TIMEOUT = timedelta(hours=1)

Handler = Callable[[Any], Any]
"""Takes a `Message`, or a `Batch` for a batch handler; may be `async def`."""


@dataclass(eq=False, slots=True)
class Receiver:
    """A handler of one topic with its options, connected to blinker as a receiver.

    once: calls a handler that takes a session, too, in a transaction; see `lisa.outbox.inbox`.
    """

    handler: Callable[..., Any]
    once: Handler | None = None
    decode: BodyDecoder | None = None
    batch: int | None = None
    within_s: float = 0.0
    timeout_s: float | None = None
    retry: RetryPolicy | None = None
    concurrency: int | None = None
    group: str = ""
    is_async: bool = field(init=False)
    run: Handler = field(init=False)
    """Calls the handler through the middleware."""

    def __post_init__(self) -> None:
        self.is_async = is_async_handler(self.handler)
        self.run = self.once or self.handler

    def use(self, middleware: Sequence[BaseMiddleware]) -> None:
        """Call the handler through middleware. Raises ConfigError if a method is missing."""
        in_batches = self.batch is not None
        call = self.once or self.handler
        self.run = _through(middleware, self.handler, call, in_batches=in_batches)

    def __call__(self, _topic: str, *, message: Message) -> Any:
        """Called by blinker, with the topic as the sender."""
        return self.run(message)

    def call(self, held: Held) -> Any:
        """Call the handler, with the body decoded as the model. Raises what the handler raises."""
        if self.decode is None:
            return self.run(held.message)
        return self.run(self.message(held))

    def message(self, held: Held) -> Message:
        """The message with its body decoded as the model.

        Raises BodyMismatch if the body does not match.
        """
        if self.decode is None:
            return held.message
        return msgspec.structs.replace(held.message, body=self.decode(decode_envelope(held.data)))


@dataclass(eq=False, slots=True)
class Listener:
    """A receiver that user code connected to a signal: `f(topic, *, message)`.

    error: why middleware cannot be called around it. Then each call raises it.
    """

    function: Callable[..., Any]
    run: Handler | None = None
    error: ConfigError | None = None
    timeout_s: None = None

    @classmethod
    def of(cls, function: Callable[..., Any], middleware: Sequence[BaseMiddleware]) -> Listener:
        """A listener whose function is called through middleware."""
        if not middleware:
            return cls(function)

        def call(message: Message) -> Any:
            return function(message.topic, message=message)

        try:
            return cls(function, _through(middleware, function, call))
        except ConfigError as error:
            return cls(function, error=error)

    @property
    def is_async(self) -> bool:
        """Whether the function is `async def`."""
        return is_async_handler(self.function)

    def call(self, held: Held) -> Any:
        """Call the function. Raises what it raises."""
        if self.error is not None:
            raise self.error
        if self.run is None:
            return self.function(held.message.topic, message=held.message)
        return self.run(held.message)


def _through(
    middleware: Sequence[BaseMiddleware],
    handler: Callable[..., Any],
    call: Handler,
    *,
    in_batches: bool = False,
) -> Handler:
    """A function that makes a call of a handler through middleware. Raises ConfigError."""
    if not middleware:
        return call
    form = "handle_batch" if in_batches else "handle"
    if is_async_handler(handler):
        form += "_async"
    user = f"the handler {function_name(handler)}"
    return chain(methods(middleware, HANDLE, form, user), call)


class HandlerPlan(NamedTuple):
    """The current handlers of a topic: single-message receivers and at most one batch handler.

    is_async: whether all are `async def`, so that no thread is needed.
    timeout_s: the shortest of their timeouts in seconds; 1 h if none has a timeout.
    """

    receivers: tuple[Receiver | Listener, ...]
    batch: Receiver | None
    is_async: bool
    timeout_s: float

    def check(self) -> None:
        """Raise ConfigError if a receiver lacks a method of the middleware.

        Receivers may also be connected later. Their messages then fail with this error.
        """
        for receiver in self.receivers:
            if isinstance(receiver, Listener) and receiver.error is not None:
                raise receiver.error

    @property
    def names(self) -> list[str]:
        """The names of the handlers, with their modules."""
        functions = [
            receiver.handler if isinstance(receiver, Receiver) else receiver.function
            for receiver in (*self.receivers, *filter(None, [self.batch]))
        ]
        return [f"{function.__module__}.{function_name(function)}" for function in functions]

    @property
    def is_empty(self) -> bool:
        """Whether the topic has no handler."""
        return not (self.receivers or self.batch)


SHARED_OPTIONS = ("retry", "concurrency")
"""Options that apply to the messages of a topic, so its handlers cannot give different values."""


class Handlers:
    """A consumer's own signals and handlers; the module-wide signals are used in addition."""

    def __init__(self) -> None:
        self.signals = Signals()
        self._own: dict[str, list[Receiver]] = {}
        self._batches: dict[tuple[str, str], Receiver] = {}
        self._named: set[tuple[str, str]] = set()
        """Topics with the groups that a handler names."""
        self.middleware: Sequence[BaseMiddleware] = ()

    def use(self, middleware: Sequence[BaseMiddleware]) -> None:
        """Call all handlers through middleware. Raises ConfigError if a method is missing."""
        self.middleware = middleware
        for receiver in itertools.chain(*self._own.values(), self._batches.values()):
            receiver.use(middleware)

    def add(
        self,
        topic: str,
        handler: Callable[..., Any],
        *,
        model: Any = None,
        batch: int | None = None,
        within: timedelta | str | None = None,
        timeout: timedelta | str | None = None,
        retry: object = None,
        concurrency: int | None = None,
        group: str | None = None,
        once_in: Any = None,
    ) -> None:
        """Register a handler of a topic.

        Raises ConfigError if an option or the handler's signature is invalid, and InvalidMessage if
        the topic name is.
        """
        topic = check_topic(topic)
        if once_in is not None and batch is not None:
            raise ConfigError(
                f"topic {topic!r}: a batch handler cannot have once_in=: its messages fail one by "
                "one, a transaction only as a whole; handle single messages, or leave out once_in="
            )
        once = None if once_in is None else self._once(topic, handler, once_in)
        session = () if once_in is None or isinstance(once_in, str) else ("session",)
        check_signature(topic, handler, "message" if batch is None else "batch", *session)
        receiver = Receiver(
            handler,
            once=once,
            decode=None if model is None else decoder_for(model),
            batch=checked_batch(topic, batch, within),
            within_s=checked_seconds(topic, "within", within) or 0.0,
            timeout_s=checked_seconds(topic, "timeout", timeout),
            retry=None if retry is None else checked_retry(topic, retry),
            concurrency=checked_concurrency(topic, concurrency),
            group="" if group is None else check_group(group),
        )
        receiver.use(self.middleware)
        for name in SHARED_OPTIONS:
            self._check_shared(topic, receiver.group, name, getattr(receiver, name))
        where = topic, receiver.group
        if receiver.once and any(
            known.once and known.group == receiver.group for known in self._own.get(topic, ())
        ):
            raise ConfigError(
                f"topic {topic!r}: another handler has once_in= already; call both from one "
                "handler, whose transaction has both effects"
            )
        if receiver.batch is None:
            self._own.setdefault(topic, []).append(receiver)
            self.signals.received.connect(receiver, sender=topic, weak=False)
        elif where in self._batches:
            raise ConfigError(f"topic {topic!r} already has a batch handler; only one is allowed")
        else:
            self._batches[where] = receiver
        if receiver.group:
            self._named.add(where)

    def _once(self, topic: str, handler: Callable[..., Any], once_in: Any) -> Handler:
        """A function that calls a handler in a transaction of an inbox. Raises ConfigError."""
        with requires("sql"):
            from lisa.outbox.inbox import Inbox
        try:
            inbox = once_in if isinstance(once_in, Inbox) else Inbox(once_in)
            return inbox.around(handler, is_async=is_async_handler(handler), is_success=is_success)
        except ConfigError as error:
            raise ConfigError(f"topic {topic!r}: {error}") from None

    def remove(self, topic: str) -> None:
        """Remove the handlers of a topic that `add` registered."""
        self._batches = {where: one for where, one in self._batches.items() if where[0] != topic}
        self._named = {where for where in self._named if where[0] != topic}
        for receiver in self._own.pop(topic, []):
            self.signals.received.disconnect(receiver, sender=topic)

    def topics(self) -> list[str]:
        """The topics of this consumer's own handlers, sorted by name."""
        batches = {topic for topic, _ in self._batches}
        return sorted(batches.union(_senders(self.signals.received)))

    def groups(self, topic: str) -> list[str]:
        """The groups that handlers of a topic name, sorted."""
        return sorted(group for named, group in self._named if named == topic)

    def has_without_group(self, topic: str) -> bool:
        """Whether a handler of the topic names no group."""
        own = self._own.get(topic, ())
        return (topic, "") in self._batches or any(not receiver.group for receiver in own)

    def module_topics(self) -> list[str]:
        """The topics of module-wide receivers, sorted by name."""
        return sorted(_senders(everywhere.received))

    def _scope(self, topic: str, wanted: str) -> str:
        """The group that its handlers name, or "" for that of handlers that name none."""
        return wanted if (topic, wanted) in self._named else ""

    def batch(self, topic: str, wanted: str = "") -> Receiver | None:
        """The batch handler of a topic for a requested group, or None."""
        return self._batches.get((topic, self._scope(topic, wanted)))

    def option(self, topic: str, wanted: str, name: str) -> Any:
        """The value of one of `SHARED_OPTIONS` that a handler gives, or None."""
        scope = self._scope(topic, wanted)
        own = [receiver for receiver in self._own.get(topic, ()) if receiver.group == scope]
        every = [*own, *filter(None, [self._batches.get((topic, scope))])]
        return next(
            (value for receiver in every if (value := getattr(receiver, name)) is not None), None
        )

    def _check_shared(self, topic: str, group: str, name: str, value: object) -> None:
        known = self.option(topic, group, name)
        if None not in (known, value) and known != value:
            raise ConfigError(
                f"topic {topic!r}: another handler has a different {name}=; one value applies to "
                "all handlers of a topic"
            )

    def plan(self, topic: str, wanted: str = "") -> HandlerPlan:
        """The current handlers of a topic for a requested group, or "".

        Weakly connected receivers may have disappeared.
        """
        scope, receivers = self._scope(topic, wanted), list[Receiver | Listener]()
        for signal in (self.signals.received, everywhere.received):
            for heard in signal.receivers_for(topic):
                if not isinstance(heard, Receiver):
                    receivers.append(Listener.of(heard, self.middleware))
                elif heard.group == scope:
                    receivers.append(heard)
        batch = self._batches.get((topic, scope))
        every = [*receivers, batch] if batch else receivers
        timeouts = [handler.timeout_s for handler in every if handler.timeout_s is not None]
        is_async = bool(every) and all(handler.is_async for handler in every)
        timeout_s = min(timeouts, default=DEFAULT_TIMEOUT.total_seconds())
        return HandlerPlan(tuple(receivers), batch, is_async, timeout_s)


def _senders(signal: Signal) -> Iterator[str]:
    # blinker has no public list of senders; it uses a string sender as its own key.
    for sender, receivers in list(signal._by_sender.items()):  # noqa: SLF001
        if isinstance(sender, str) and receivers:
            yield sender


class Batch(Sequence[Message[Body_co]]):
    """The messages of one call of a batch handler, annotated as in `Batch[Order]`.

    If the handler returns, all messages are acked; if it raises, all are retried. Messages passed
    to `fail` follow their own errors instead.
    """

    def __init__(self, messages: Sequence[Message[Body_co]]) -> None:
        self._messages = messages
        self._failed: dict[str, Verdict] = {}

    @overload
    def __getitem__(self, index: int) -> Message[Body_co]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Message[Body_co]]: ...
    def __getitem__(self, index: int | slice) -> Message[Body_co] | Sequence[Message[Body_co]]:
        return self._messages[index]

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Message[Body_co]]:
        return iter(self._messages)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)}, {len(self._failed)} failed>"

    def fail(self, message: Message, error: BaseException | str) -> None:
        """Mark one message as failed, as if the handler had raised `error` for it alone.

        Also for a `Retry`, `Defer` or `Discard`.

        Raises InvalidMessage if the message is not in this batch.
        """
        if not any(own is message for own in self._messages):
            raise InvalidMessage(f"message {message.id!r} is not in this batch")
        self._failed[message.id] = verdict_of(meant_to_be_raised(error) or error)

    def verdict(self, message: Message) -> Verdict | None:
        """The verdict of `fail` on a message, or None."""
        return self._failed.get(message.id)


Wait = Callable[[Awaitable[Any]], Any]
"""Waits on a thread for an awaitable that runs on the event loop."""

NO_RECEIVER = Verdict("this topic no longer has a receiver")
NOT_RUN = Verdict("the handler returned a generator or a coroutine, whose code has not run")


class AwaitResult(NamedTuple):
    """Wait for an awaitable, such as one that a handler returned."""

    awaitable: Awaitable[Any]

    def run(self, wait: Wait) -> Any:
        """The result; `wait` runs the awaitable on an event loop."""
        return wait(self.awaitable)

    def arun(self, _link: object) -> Awaitable[Any]:
        """The awaitable."""
        return self.awaitable


def on_message(plan: HandlerPlan, held: Held) -> Flow[Outcome]:
    """Call all receivers, even after one has raised."""
    if not plan.receivers:
        return NO_RECEIVER
    worst: Outcome = None
    for receiver in plan.receivers:
        try:
            result = receiver.call(held)
            if result is not None and inspect.isawaitable(result):
                result = yield AwaitResult(result)
            worst = combined(worst, _outcome_of_result(result))
        except asyncio.CancelledError as error:
            return verdict_of(error)
        except BaseException as error:  # noqa: BLE001  sys.exit() in a handler is a failure too
            worst = combined(worst, _outcome_of_error(error))
    return worst


def on_message_sync(plan: HandlerPlan, held: Held, wait: Wait) -> Outcome:
    """Run `on_message` on a thread; the common case of one receiver needs no generator."""
    if len(plan.receivers) != 1:
        return drive(on_message(plan, held), wait)
    try:
        result = plan.receivers[0].call(held)
        if result is None:
            return None
        if inspect.isawaitable(result):
            result = wait(result)
    except BaseException as error:  # noqa: BLE001  as in on_message
        return _outcome_of_error(error)
    return _outcome_of_result(result)


def on_batch(plan: HandlerPlan, deliveries: list[Held]) -> Flow[list[Outcome]]:
    """Call the receivers of single messages, then the batch handler once.

    Once the batch is cancelled, what was not called yet is not called.
    """
    receiver = plan.batch
    outcomes: list[Outcome] = [None] * len(deliveries)
    fitting: list[tuple[int, Message]] = []
    for index, held in enumerate(deliveries):
        if receiver is None or plan.receivers:
            outcome = outcomes[index] = yield from on_message(plan, held)
            if _is_cancelled(outcome, deliveries):
                done = index if receiver is None else 0
                return [*outcomes[:done], *(known or outcome for known in outcomes[done:])]
        if receiver is None:
            continue
        try:
            fitting.append((index, receiver.message(held)))
        except Exception as error:  # noqa: BLE001  a model's validators may raise anything
            outcomes[index] = combined(outcomes[index], _outcome_of_error(error))
    if receiver is not None and fitting:
        batch = Batch([message for _, message in fitting])
        said = yield from _call_batch(receiver.run, batch)
        for index, message in fitting:
            outcomes[index] = combined(outcomes[index], batch.verdict(message) or said)
    return outcomes


def _is_cancelled(outcome: Outcome, deliveries: list[Held]) -> bool:
    """Whether the consumer cancelled a batch; a receiver may also raise CancelledError itself."""
    is_cancelled = outcome is not None and isinstance(outcome.error, asyncio.CancelledError)
    return is_cancelled and any(held.overdue or held.ended for held in deliveries)


def _call_batch(handler: Callable[[Batch], Any], batch: Batch) -> Flow[Outcome]:
    try:
        result = handler(batch)
        if result is not None and inspect.isawaitable(result):
            result = yield AwaitResult(result)
    except BaseException as error:  # noqa: BLE001  as in on_message
        return verdict_of(error)
    return _outcome_of_result(result)


def _outcome_of_result(result: object) -> Outcome:
    """The outcome of a handler that returned."""
    if result is None:
        return None
    if isinstance(result, (GeneratorType, AsyncGeneratorType, CoroutineType)):
        return NOT_RUN
    if (error := meant_to_be_raised(result)) is not None:
        return verdict_of(error)
    return RETURNED_FALSE if result is False else None


def _outcome_of_error(error: BaseException) -> Verdict:
    """The outcome of a handler that raised, or of a body that does not match its model."""
    is_mismatch = isinstance(error, BodyMismatch)
    return Verdict(str(error), "discard") if is_mismatch else verdict_of(error)
