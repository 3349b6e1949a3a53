"""What `Consumer` and `AsyncConsumer` share, and the public `Consumer` class."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, Unpack, overload

from blinker import Signal

from lisa.consumer.event_loop import AppLoop
from lisa.consumer.handlers import Batch, Handlers, Receiver
from lisa.consumer.lifespan import Lifespan, entering
from lisa.consumer.options import ConsumerOptions, WantedTopic
from lisa.consumer.pull import Delivery
from lisa.consumer.runtime import Runtime
from lisa.core.daemon.process_signals import Mailbox, stopping
from lisa.core.metrics.numbers import Numbers
from lisa.core.model.clock import named_duration, option_duration
from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.model.keys import Keys, check_topic
from lisa.core.model.message import Message
from lisa.core.model.middleware import BaseMiddleware, checked
from lisa.core.model.options import GRACE
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.model.sharding import Topic
from lisa.core.model.signals import everywhere
from lisa.core.redis.address import Address
from lisa.core.redis.flow import rename_inherited

if TYPE_CHECKING:
    from blinker import Signal

    from lisa.core.settings import ConsumerSettings
    from lisa.outbox.inbox import Inbox, InboxDatabase

H = TypeVar("H", bound=Callable[..., Any])
M = TypeVar("M")
R = TypeVar("R")
S = TypeVar("S")


class HandlerOptions(TypedDict, total=False):
    """The options of `on` and `subscribe`, besides `model`, `batch` and `once_in`."""

    within: timedelta | str | None
    timeout: timedelta | str | None
    retry: RetryPolicy | str | Sequence[timedelta | str] | None
    concurrency: int | None
    group: str | None


class Registration:
    """The part of `Consumer` that takes handlers and receivers."""

    _new_handlers = Handlers

    def __init__(self) -> None:
        self._handlers = self._new_handlers()

    @property
    def message_received(self) -> Signal:
        """Fired for each delivered message; its receivers handle the message."""
        return self._handlers.signals.received

    @property
    def message_acked(self) -> Signal:
        """Fired when Redis has confirmed the ack of a message."""
        return self._handlers.signals.acked

    @property
    def message_retrying(self) -> Signal:
        """Fired when a message failed and will be retried."""
        return self._handlers.signals.retrying

    @property
    def message_dead(self) -> Signal:
        """Fired when a message becomes a dead letter."""
        return self._handlers.signals.dead

    @property
    def message_expired(self) -> Signal:
        """Fired when a message is past its ttl and will not be handled."""
        return self._handlers.signals.expired

    def _registered(self, topic: str) -> None:
        """Called after a handler of a topic was added."""

    @overload
    def on(
        self,
        topic: str,
        *,
        model: type[M],
        batch: None = None,
        once_in: str | None = None,
        **options: Unpack[HandlerOptions],
    ) -> Callable[[Callable[[Message[M]], R]], Callable[[Message[M]], R]]: ...
    @overload
    def on(
        self,
        topic: str,
        *,
        model: type[M],
        batch: None = None,
        once_in: InboxDatabase | Inbox,
        **options: Unpack[HandlerOptions],
    ) -> Callable[[Callable[[Message[M], S], R]], Callable[[Message[M], S], R]]: ...
    @overload
    def on(
        self, topic: str, *, model: type[M], batch: int, **options: Unpack[HandlerOptions]
    ) -> Callable[[Callable[[Batch[M]], R]], Callable[[Batch[M]], R]]: ...
    @overload
    def on(
        self,
        topic: str,
        handler: None = None,
        *,
        model: Any = None,
        batch: int | None = None,
        once_in: InboxDatabase | Inbox | str | None = None,
        **options: Unpack[HandlerOptions],
    ) -> Callable[[H], H]: ...
    @overload
    def on(
        self,
        topic: str,
        handler: H,
        *,
        model: Any = None,
        batch: int | None = None,
        once_in: InboxDatabase | Inbox | str | None = None,
        **options: Unpack[HandlerOptions],
    ) -> H: ...
    def on(
        self,
        topic: str,
        handler: Any = None,
        *,
        model: Any = None,
        batch: int | None = None,
        within: timedelta | str | None = None,
        timeout: timedelta | str | None = None,
        retry: RetryPolicy | str | Sequence[timedelta | str] | None = None,
        concurrency: int | None = None,
        group: str | None = None,
        once_in: InboxDatabase | Inbox | str | None = None,
    ) -> Any:
        """Register a handler of a topic, as a decorator or by a call with the handler.

        A running consumer starts to read the topic. So does one whose block was entered without
        handlers: it starts with the first one.

        model: type of the body (msgspec Struct, dataclass, TypedDict, pydantic model). A message
            whose body does not match becomes a dead letter, with the reason.
        batch: call the handler with a `Batch` of up to this many messages.
        within: how long the first message of a batch waits for others; 0 by default.
        timeout: how long a handler may run; after that, its lease expires and the message
            is retried; 1 h by default.
        retry: the pauses after failures, as a `RetryPolicy`, text such as `"1s,10s,1m"` or a
            sequence; by default those of the message or the topic, which in any case limit the
            number of attempts. `Retry(delay=)` takes precedence.

        concurrency: the most handlers of this topic that run at the same time; at most the
            consumer's, which is the default. Given before the consumer reads the topic.
        group: the group whose messages the handler takes, declared if missing; by default those of
            the consumer's group. Several groups of one topic may have handlers.

        once_in: the SQLAlchemy engine or sessionmaker, or `lisa.outbox.Inbox`, whose database
            the handler writes to, as `handler(message, session)`. What it writes is committed when
            it returns, once for each send, however often the message is delivered. Not for batch
            handlers; one handler of a topic and group may have it. With `lisa.django.consumer`
            also the alias of a database, as for `handler(message)`.

        The handlers of one topic and group share `retry` and `concurrency`: giving two values is a
        ConfigError. The handler takes one positional argument, or two with `once_in`, and may be
        `async def`. The consumer keeps a strong reference. Raises ConfigError if an option or the
        handler's signature is invalid.
        """
        if callable(topic):  # `@consumer.on` without a call would register nothing
            raise ConfigError("a handler's topic is missing; write @consumer.on('TOPIC')")

        def take(function: H) -> H:
            self._handlers.add(
                topic,
                function,
                model=model,
                batch=batch,
                within=within,
                timeout=timeout,
                retry=retry,
                concurrency=concurrency,
                group=group,
                once_in=once_in,
            )
            self._registered(topic)
            return function

        return take if handler is None else take(handler)


log = logging.getLogger("lisa.consumer")

_PUBLIC = ("__init__", "configure", "health", "numbers", "on", "subscribe", "topics")
"""The methods whose errors about arguments name `Consumer` or `AsyncConsumer`."""


class BaseConsumer(Registration):
    """The part of both consumers that neither blocks nor awaits, and blocking private methods.

    The options are those of `Consumer`.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        rename_inherited(cls, _PUBLIC)

    def __init__(
        self,
        server: str | Address | None = None,
        *,
        group: str | None = None,
        name: str | None = None,
        concurrency: int = 1,
        prefix: str | None = None,
        poll_timeout: timedelta | str = timedelta(seconds=5),
        poll_batch_size: int | None = None,
        grace: timedelta | str = GRACE,
        lifespan: Lifespan | None = None,
        middleware: Iterable[BaseMiddleware] = (),
    ) -> None:
        super().__init__()
        self._options = ConsumerOptions(
            address=Address.of(server),
            keys=Keys.of(prefix),
            in_code=[
                option
                for option, given in (("address", server), ("keys", prefix))
                if given is not None
            ],
            group=group,
            name=name,
            concurrency=concurrency,
            poll_timeout=option_duration("poll_timeout", poll_timeout),
            poll_batch_size=poll_batch_size,
            grace=option_duration("grace", grace),
            lifespan=lifespan,
            middleware=checked(middleware),
        ).checked()
        self._handlers.use(self._options.middleware)
        self._runtime: Runtime | None = None
        self._lock = threading.RLock()
        self._stopping = threading.Lock()
        self._app: AppLoop | None = None
        self._is_entered = False
        """Whether the consumer's block was entered without handlers, so the first one starts it."""
        self._is_started_by_block = False
        for received in (self._handlers.signals.received, everywhere.received):
            received.receiver_connected.connect(self._connected)

    @classmethod
    def from_config(
        cls,
        path: Path | str | None = None,
        *,
        lifespan: Lifespan | None = None,
        middleware: Iterable[BaseMiddleware] = (),
        **overrides: Any,
    ) -> Self:
        """Create a consumer from a YAML file, the environment and the overrides.

        `groups` in the file names the topics; see `lisa.core.settings.ConsumerSettings.load`.
        `middleware` comes after that of the file. Raises ConfigError if a setting is invalid.
        """
        # Imported late: constructing a consumer directly should not load pydantic.
        from lisa.core.settings import ConsumerSettings

        settings = ConsumerSettings.load(path, **overrides)
        settings.require_enabled()
        consumer = cls(lifespan=lifespan, middleware=middleware)
        consumer.configure(settings)
        return consumer

    @property
    def server(self) -> tuple[Address, str]:
        """The server's address and the key prefix."""
        return self._options.address, self._options.keys.prefix

    def configure(self, settings: ConsumerSettings, flags: Collection[str] | None = None) -> None:
        """Apply settings before `start`. Raises ConfigError if the consumer runs.

        With `flags`, the names of the settings from the command line, only those that are set; a
        server or a prefix that the constructor got is kept then, unless a flag names another.
        """
        if self._is_used:
            raise ConfigError("a running consumer cannot be configured")
        options = self._options = self._options.with_settings(settings, flags)
        self._handlers.use(checked([*options.configured_middleware, *options.middleware]))

    @property
    def _is_used(self) -> bool:
        """Whether the options are in use, because the consumer runs or has pulled."""
        return self._runtime is not None

    @property
    def group(self) -> str | None:
        """The group given to the constructor or set later; None joins each topic's only group.

        Setting it raises ConfigError if the consumer runs, or has pulled and was not stopped since.
        """
        return self._options.group

    @group.setter
    def group(self, name: str | None) -> None:
        if self._is_used:
            raise ConfigError("the consumer is in use; stop it before its group is changed")
        self._options = replace(self._options, group=name).checked()

    def subscribe(self, topic: str, handler: Callable[[Any], Any], **options: Any) -> None:
        """Register a handler as `on` does.

        Raises ConfigError in an asynchronous lifespan, for which the consumer's start waits.
        """
        if entering.get():
            raise ConfigError(
                "a lifespan cannot subscribe: add handlers before the consumer starts"
            )
        self.on(topic, handler, **options)

    def _registered(self, topic: str) -> None:
        if entering.get():
            return  # the start reads the topics of handlers that its lifespan adds
        with self._lock:
            if self._runtime is not None and self._runtime.is_started:
                for wanted in self._wanted_of(topic):
                    self._runtime.readers.subscribe(wanted)
            elif self._is_entered:
                self._start_by_block()

    def _connected(self, signal: Signal, *, receiver: object, sender: object, **_: object) -> None:
        """Read the topic of a receiver that was connected to `message_received`."""
        if isinstance(receiver, Receiver) or not isinstance(sender, str):
            return  # `on` registers its own receivers
        if signal is everywhere.received and (self._handlers.topics() or self._options.configured):
            return  # see `_all_wanted`
        self._registered(sender)

    def _start_by_block(self) -> None:
        """Start because the first handler was added in the consumer's block."""
        self._start(by_block=True)

    def topics(self) -> list[str]:
        """The topics that the consumer reads, or would read if it started now, sorted by name."""
        return sorted({wanted.topic for wanted in self._all_wanted()})

    def health(self) -> Mapping[str, Any]:
        """The content of `/healthz`: state by topic, and whether the server answers."""
        runtime = self._runtime
        return {"status": "stopped", "topics": {}} if runtime is None else runtime.health()

    def numbers(self) -> Numbers:
        """The metrics of this consumer, see `lisa.core.metrics.families`; empty unless it runs."""
        runtime = self._runtime
        return {} if runtime is None else runtime.numbers()

    def _fail(self, error: LisaError) -> None:
        """End `run` because a reader met an error that retries cannot solve."""
        if self._end_run(error):
            log.error("the consumer stops: %s", error)
        else:
            log.error("cannot read: %s", error)

    def _end_run(self, error: LisaError | None = None) -> bool:
        """End `run`, on any thread; `run` raises the error. Returns whether it was running."""
        raise NotImplementedError

    def _start(self, *, by_block: bool = False) -> None:
        with self._lock:
            all_wanted = self._checked_wanted()
            if self._runtime is not None and self._runtime.is_started:
                if not by_block and not self._is_started_by_block:
                    raise ConfigError("this consumer is already running")
                self._is_started_by_block = False
                return
            if self._runtime is None:
                self._runtime = self._new_runtime()
            try:
                self._runtime.start(all_wanted)
            except BaseException:
                self._runtime.close(0)
                self._runtime = None
                raise
            self._is_started_by_block = by_block
            for wanted in self._all_wanted():  # the lifespan may have added handlers
                self._runtime.readers.subscribe(wanted)

    def _stop(self) -> None:
        # Without the other lock, because handlers that finish meanwhile may subscribe or pull.
        with self._stopping:
            with self._lock:
                runtime, self._runtime = self._runtime, None
                self._is_entered = False
            try:
                if runtime is not None:
                    runtime.close(self._options.grace.total_seconds())
            finally:
                self._end_run()

    def _unsubscribe(self, topic: str) -> None:
        with self._lock:
            if self._runtime is not None:
                self._runtime.readers.unsubscribe(topic)
            self._handlers.remove(check_topic(topic))
            self._options = self._options.without(topic)

    def _checked_wanted(self) -> list[WantedTopic]:
        """What to read. Raises ConfigError if a topic or handler is missing."""
        all_wanted = self._all_wanted()
        if not all_wanted:
            raise ConfigError(
                "nothing to consume: no handler, receiver or setting names a topic; "
                "add a handler with consumer.on(topic)"
            )
        for topic, group, _ in sorted(all_wanted, key=lambda wanted: wanted.topic):
            plan = self._handlers.plan(topic, group or "")
            plan.check()
            if plan.is_empty:
                raise ConfigError(
                    f"topic {topic!r} has no handler; add one with consumer.on({topic!r})"
                )
        return all_wanted

    @staticmethod
    def _checked_pull(
        topic: str, wait: timedelta | str, ack_timeout: timedelta | str | None
    ) -> tuple[str, tuple[timedelta, timedelta | None]]:
        """The topic and the durations of a pull. Raises LisaError if an argument is invalid."""
        topic = check_topic(topic)
        timeout = None if ack_timeout is None else named_duration("ack_timeout", ack_timeout)
        return topic, (named_duration("wait", wait), timeout)

    def _new_runtime(self) -> Runtime:
        return Runtime(self._options, self._handlers, failed=self._fail, app=self._app)

    def _running(self) -> Runtime:
        if self._runtime is None:
            raise ConfigError("the consumer is not running")
        return self._runtime

    def _all_wanted(self) -> list[WantedTopic]:
        topics = self._handlers.topics()
        named = sorted({wanted.topic for wanted in self._options.configured} | set(topics))
        if not named:
            # Only without own topics, so that a second consumer does not read these as well.
            named = self._handlers.module_topics()
        return [wanted for topic in named for wanted in self._wanted_of(topic)]

    def _wanted_of(self, topic: str) -> list[WantedTopic]:
        """What to read of a topic. Raises ConfigError if handlers with and without group= meet."""
        named = self._handlers.groups(topic)
        if not named:
            return self._options.wanted_for(topic)
        configured = [wanted for wanted in self._options.configured if wanted.topic == topic]
        names = {wanted.group: wanted.name for wanted in configured}
        # With a name of its own, because a topic has one presence record for each name.
        own = self._options.name or "lisa"
        by_handlers = [WantedTopic(Topic(topic), group, names.get(group) or own) for group in named]
        if not self._handlers.has_without_group(topic):
            return [*by_handlers, *(wanted for wanted in configured if wanted.group not in named)]
        others = [wanted for wanted in self._options.wanted_for(topic) if wanted.group not in named]
        if not others:
            raise ConfigError(
                f"topic {topic!r}: one handler has group={named[0]!r} and another one takes the "
                "same group from the consumer; give group= to both or to neither"
            )
        return [*by_handlers, *others]


class Consumer(BaseConsumer):
    """Reads due messages of one or more topics and calls handlers with them.

    server, prefix: as for `Producer`.
    group: the group to join on each topic, declared if missing. None joins the topic's only group.
    name: prefix of the consumer's unique name, followed by host, pid and a random suffix.
    concurrency: the most handlers that run at the same time, over all topics.
    poll_timeout: how long one read blocks on the server.
    poll_batch_size: the most unstarted messages held per topic. None adapts to the number that
        handlers finish in 50 ms.
    grace: how long running handlers may take to finish when the consumer stops.
    lifespan: a function without arguments that returns a context manager, synchronous or not. The
        consumer enters it before it reads, and leaves it after the last handler, or after `grace`.
        Handlers find the value that it yields in `message.state`. `start` raises StartupFailed if
        it cannot be entered.
    middleware: objects whose `handle`, or another form of it, is called around each handler; the
        first one is the outermost.

    Register handlers with `on` or `subscribe`, or connect receivers to `message_received`, either
    the consumer's own or the module-wide signal. Raises ConfigError if an option is invalid.
    """

    _ending: Mailbox[LisaError | None] | None = None

    def unsubscribe(self, topic: str) -> None:
        """Remove a topic's handlers and release its unstarted messages.

        Running handlers finish, and their outcomes are settled.
        """
        self._unsubscribe(topic)

    def pause(self, topic: str | None = None) -> None:
        """Pause one topic, or all topics, in this consumer only; held messages are finished.

        Raises ConfigError if the consumer does not run.
        """
        self._running().readers.pause(topic, paused=True)

    def resume(self, topic: str | None = None) -> None:
        """Resume one topic, or all topics. Raises ConfigError if the consumer does not run."""
        self._running().readers.pause(topic, paused=False)

    def pull(
        self,
        topic: str,
        *,
        batch: int = 1,
        wait: timedelta | str = timedelta(0),
        ack_timeout: timedelta | str | None = None,
    ) -> list[Delivery]:
        """Return up to `batch` deliveries to settle yourself; waits up to `wait` for the first.

        Needs neither handlers nor `start`. `batch` may be up to 500, but one call returns at most
        250 deliveries, and fewer if the topic has several groups. `ack_timeout` replaces the
        topic's for these deliveries. On a sharded topic, each call reads one shard in turn. Raises
        LisaError.
        """
        topic, times = self._checked_pull(topic, wait, ack_timeout)
        with self._lock:
            if self._runtime is None:
                self._runtime = self._new_runtime()
            runtime, puller = self._runtime, self._runtime.puller(self._options.group)
        return runtime.drive(puller.pull(topic, batch, *times))

    def start(self) -> Self:
        """Start the consumer's threads and return the consumer; retries an unreachable server.

        Raises ConfigError if a topic or handler is missing, or if the consumer already runs.
        """
        self._start()
        return self

    def stop(self) -> None:
        """Stop reading, release unstarted messages, and let running handlers finish in `grace`.

        If one of the consumer's handlers calls `stop`, it returns and stops in the background.
        """
        runtime = self._runtime
        if runtime is not None and runtime.owns_this_thread():
            threading.Thread(target=self.stop, name="lisa-stop", daemon=True).start()
            return
        self._stop()

    close = stop

    def run(self) -> None:
        """Run until SIGTERM, SIGINT or `stop`; a second signal ends the process immediately.

        SIGHUP, as of a closed terminal, stops it, too, unless the program handles or ignores it.
        Raises ConfigError, also for errors found later, such as a topic with several groups.
        """
        ending = self._ending = Mailbox()
        try:
            with _until_signalled(ending):
                self.start()
                try:
                    failure = ending.get()
                finally:
                    self.stop()
        finally:
            self._ending = None
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        if self._all_wanted():
            return self.start()
        self._is_entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _end_run(self, error: LisaError | None = None) -> bool:
        ending = self._ending
        if ending is not None:
            ending.post(error)
        return ending is not None


def _until_signalled(ending: Mailbox[LisaError | None]) -> AbstractContextManager[None]:
    """Post None at the first signal; a second SIGTERM or SIGINT ends the process.

    SIGHUP does not count, because a closing terminal, or systemd, may send it along with another.
    """
    if threading.current_thread() is not threading.main_thread():
        return nullcontext()
    heard: list[int] = []

    def hear(number: int) -> None:
        if heard and number != signal.SIGHUP:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if number != signal.SIGHUP:
            heard.append(number)
        ending.post(None)

    return ending.handling_signals(hear, stopping())
