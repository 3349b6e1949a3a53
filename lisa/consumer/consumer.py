"""The consumer: takes what is due, calls its handlers, settles what they did."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar, overload

from blinker import Signal

from lisa.consumer.crew import Crew, Wanted
from lisa.consumer.delivery import Delivery
from lisa.consumer.handlers import Handlers
from lisa.core.address import DEFAULT_URL, Address
from lisa.core.errors import ConfigError, LisaError
from lisa.core.keys import DEFAULT_PREFIX, Keys, check_group, check_topic
from lisa.core.mailbox import STOPPING, Mailbox
from lisa.core.metrics.numbers import Numbers
from lisa.core.settings import ConsumerSettings

__all__ = ["Consumer"]

log = logging.getLogger("lisa.consumer")

H = TypeVar("H", bound=Callable[..., Any])

LARGEST_CONCURRENCY = 10_000


class Consumer:
    """Takes due messages of one or more topics and hands them to handlers.

    group: the group to join on each topic, declared if need be; None joins the topic's only one.
    name: first part of the name under which it takes messages; host, pid and chance follow.
    concurrency: how many handlers run at a time, all topics together.
    poll_timeout: how long one read waits at the server.
    poll_batch_size: the most messages held unstarted per topic; None: what handlers finish in
        50 ms.
    grace: how long running handlers may take to finish once it stops.

    Handlers are taken by `on`, by `subscribe`, or as receivers of `message_received`, here or
    module-wide. Raises ConfigError for what cannot work.
    """

    def __init__(
        self,
        server: str | Address = DEFAULT_URL,
        *,
        group: str | None = None,
        name: str | None = None,
        concurrency: int = 1,
        prefix: str = DEFAULT_PREFIX,
        poll_timeout: timedelta = timedelta(seconds=5),
        poll_batch_size: int | None = None,
        grace: timedelta = timedelta(seconds=30),
    ) -> None:
        self._address = Address.of(server)
        self._keys = Keys(prefix)
        self._group = None if group is None else check_group(group)
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigError(f"name={name!r} is no name: leave it out, or give some text")
        self._name = name
        self._concurrency = _checked("concurrency", concurrency, LARGEST_CONCURRENCY)
        self._poll_timeout = poll_timeout
        self._cap = poll_batch_size
        if poll_timeout <= timedelta(0):
            raise ConfigError(f"poll_timeout {poll_timeout} is not above 0")
        if poll_batch_size is not None:
            _checked("poll_batch_size", poll_batch_size, 1_000_000)
        self._grace = grace
        self._configured: list[Wanted] = []
        self._handlers = Handlers()
        self._crew: Crew | None = None
        self._lock = threading.RLock()
        self._stopping = threading.Lock()
        self._orders: Mailbox[int] | None = None
        self._failure: LisaError | None = None

    @classmethod
    def from_config(cls, path: Path | str | None = None, **overrides: Any) -> Self:
        """A consumer as the YAML file, the environment and the overrides say.

        See `lisa.core.settings.ConsumerSettings.load`; the topics are those of `groups`. Raises
        ConfigError.
        """
        settings = ConsumerSettings.load(path, **overrides)
        settings.require_enabled()
        consumer = cls()
        consumer.configure(settings)
        return consumer

    @property
    def server(self) -> tuple[Address, str]:
        """The server's address and the prefix of its keys."""
        return self._address, self._keys.prefix

    def configure(self, settings: ConsumerSettings, *, only_given: bool = False) -> None:
        """Take over settings before the start; `only_given`: leave alone what they do not name."""
        if self._crew is not None:
            raise ConfigError("a consumer that runs cannot be configured")
        server = settings.consumer_server
        given = settings.model_fields_set if only_given else type(settings).model_fields
        inner = server.model_fields_set if only_given else type(server).model_fields
        if not only_given or settings.redis.model_fields_set:
            self._address = Address.from_settings(settings.redis)
        if "prefix" in given:
            self._keys = Keys(settings.prefix)
        if "concurrency" in inner:
            self._concurrency = server.concurrency
        if "poll_timeout_millis" in inner:
            self._poll_timeout = timedelta(milliseconds=server.poll_timeout_millis)
        if "poll_batch_size" in inner:
            self._cap = server.poll_batch_size
        if "grace" in inner:
            self._grace = server.grace
        self._configured = [
            Wanted(entry.topic, entry.group, entry.consumer) for entry in settings.groups
        ]

    @property
    def group(self) -> str | None:
        """The group that was asked for."""
        return self._group

    @group.setter
    def group(self, name: str | None) -> None:
        self._group = None if name is None else check_group(name)

    @property
    def message_received(self) -> Signal:
        """A message is in flight: handle it."""
        return self._handlers.signals.received

    @property
    def message_acked(self) -> Signal:
        """Redis confirmed that a message is settled."""
        return self._handlers.signals.acked

    @property
    def message_retrying(self) -> Signal:
        """A message failed and will be tried again."""
        return self._handlers.signals.retrying

    @property
    def message_dead(self) -> Signal:
        """A message went to garbage."""
        return self._handlers.signals.dead

    @property
    def message_expired(self) -> Signal:
        """A message was past its ttl and will not be handled."""
        return self._handlers.signals.expired

    @overload
    def on(
        self,
        topic: str,
        handler: None = None,
        *,
        model: Any = None,
        batch: int | None = None,
        within: timedelta | str | None = None,
        timeout: timedelta | str | None = None,
    ) -> Callable[[H], H]: ...
    @overload
    def on(
        self,
        topic: str,
        handler: H,
        *,
        model: Any = None,
        batch: int | None = None,
        within: timedelta | str | None = None,
        timeout: timedelta | str | None = None,
    ) -> H: ...
    def on(self, topic: str, handler: H | None = None, **options: Any) -> H | Callable[[H], H]:
        """Have a topic's messages handled: a decorator, or called with the handler.

        model: what the body is to be (msgspec Struct, dataclass, TypedDict, pydantic model); a
            body that does not fit goes to garbage with the reason.
        batch: one call with a `Batch` of up to so many messages; `within` bounds how long the
            first of them waits for others (0 if not given).
        timeout: after so long a hanging handler loses its lease and the message is retried (1 h).

        The handler takes one argument, may be `async def`, and is held strongly.
        """

        def take(function: H) -> H:
            self._handlers.add(topic, function, **options)
            return function

        return take if handler is None else take(handler)

    def subscribe(self, topic: str, handler: Callable[[Any], Any], **options: Any) -> None:
        """`on`, also while the consumer runs: its topic is taken from now on."""
        with self._lock:
            self.on(topic, handler, **options)
            if self._crew is not None:
                for wanted in self._wanted_for(topic):
                    self._crew.take(wanted)

    def unsubscribe(self, topic: str) -> None:
        """Let go of a topic's handlers; what no handler has started on goes back at once.

        Running handlers finish, and what they did is settled.
        """
        with self._lock:
            if self._crew is not None:
                self._crew.let_go(topic)
            self._handlers.remove(check_topic(topic))
            self._configured = [one for one in self._configured if one.topic != topic]

    def pause(self, topic: str | None = None) -> None:
        """Stop reading a topic, or all, in this consumer only; what it holds is finished."""
        self._running().pause(topic, paused=True)

    def resume(self, topic: str | None = None) -> None:
        """Read again."""
        self._running().pause(topic, paused=False)

    def pull(
        self,
        topic: str,
        *,
        batch: int = 1,
        wait: timedelta = timedelta(0),
        ack_timeout: timedelta | None = None,
    ) -> list[Delivery]:
        """At most `batch` deliveries for one's own loop; waits up to `wait` for the first.

        Needs neither handlers nor `start`. `batch` may be up to 500, but no more than 250 come at
        once, and fewer where the topic has several groups. `ack_timeout` replaces the topic's for
        these. Of a topic that is split they are one shard's, another's the next time. Raises
        LisaError.
        """
        check_topic(topic)
        with self._lock:
            if self._crew is None:
                self._crew = self._new_crew()
            puller = self._crew.puller(self._group)
        return puller.pull(topic, batch, wait, ack_timeout)

    def topics(self) -> list[str]:
        """The topics that it takes, or would take if it started now."""
        return sorted({wanted.topic for wanted in self._all_wanted()})

    def start(self) -> Self:
        """Begin to take messages, on threads of its own. Raises ConfigError.

        A server that does not answer is no error: it is tried until it does.
        """
        with self._lock:
            all_wanted = self._all_wanted()
            if not all_wanted:
                raise ConfigError("nothing to consume: no handler, receiver or setting names a "
                                  "topic; use consumer.on(topic)")  # fmt: skip
            for topic in sorted({wanted.topic for wanted in all_wanted}):
                if self._handlers.plan(topic).is_empty:
                    raise ConfigError(f"nobody would receive the messages of topic {topic!r}: add "
                                      f"a handler with consumer.on({topic!r})")  # fmt: skip
            if self._crew is not None and self._crew.is_started:
                raise ConfigError("this consumer runs already")
            if self._crew is None:
                self._crew = self._new_crew()
            try:
                self._crew.start(all_wanted)
            except LisaError:
                self._crew.close(0)
                self._crew = None
                raise
        return self

    def stop(self) -> None:
        """Stop reading, give unstarted work back, let running handlers finish within `grace`.

        Called by one of its own handlers, it stops in the background.
        """
        crew = self._crew
        if crew is not None and crew.owns_this_thread():
            threading.Thread(target=self.stop, name="lisa-stop", daemon=True).start()
            return
        # Not under the other lock: handlers that are still to finish may subscribe or pull.
        with self._stopping:
            with self._lock:
                crew, self._crew = self._crew, None
            try:
                if crew is not None:
                    crew.close(self._grace.total_seconds())
            finally:
                self._end_run()

    close = stop

    def run(self) -> None:
        """Start, and stop at SIGTERM, SIGINT or `stop`; a second signal leaves at once.

        Raises ConfigError, also for what only shows while it runs (several groups, for one).
        """
        orders = self._orders = Mailbox()
        with self._signals_heard(orders):
            self.start()
            try:
                orders.get()
            finally:
                self.stop()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def __enter__(self) -> Self:
        return self.start() if self._all_wanted() else self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def health(self) -> Mapping[str, Any]:
        """State by topic and whether the server answers, as `/healthz` shows it."""
        crew = self._crew
        return {"status": "stopped", "topics": {}} if crew is None else crew.health()

    def numbers(self) -> Numbers:
        """What `/metrics` shows of it, by `lisa.core.metrics.families`; empty unless it runs."""
        crew = self._crew
        return {} if crew is None else crew.numbers()

    def _fail(self, error: LisaError) -> None:
        """Told by a reader of what no waiting will mend."""
        log.error("the consumer ends: %s", error)
        self._failure = error
        self._end_run()

    def _end_run(self) -> None:
        if self._orders is not None:
            self._orders.post(0)

    def _new_crew(self) -> Crew:
        return Crew(
            self._address, self._keys, self._handlers, name=self._name,
            concurrency=self._concurrency, poll=self._poll_timeout, cap=self._cap,
            failed=self._fail,
        )  # fmt: skip

    def _running(self) -> Crew:
        if self._crew is None:
            raise ConfigError("the consumer does not run")
        return self._crew

    def _all_wanted(self) -> list[Wanted]:
        topics = self._handlers.topics()
        named = sorted({wanted.topic for wanted in self._configured} | set(topics))
        if not named:
            # Only without any of its own: a second consumer must not take these as well.
            named = self._handlers.module_topics()
        return [wanted for topic in named for wanted in self._wanted_for(topic)]

    def _wanted_for(self, topic: str) -> Iterable[Wanted]:
        found = [wanted for wanted in self._configured if wanted.topic == topic]
        if self._group is not None:
            found = [Wanted(topic, self._group, found[0].name if found else None)]
        return found or [Wanted(topic, None, None)]

    @contextmanager
    def _signals_heard(self, orders: Mailbox[int]) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard: list[float] = []

        def hear(number: int, _frame: FrameType | None) -> None:
            if heard:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            heard.append(time.monotonic())
            orders.post(number)

        before = {number: signal.signal(number, hear) for number in STOPPING}
        try:
            with orders.hearing_signals():
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _checked(name: str, value: object, highest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= highest:
        raise ConfigError(f"{name}={value!r} is not a whole number from 1 to {highest}")
    return value
