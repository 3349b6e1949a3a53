"""`Producer` and `AsyncProducer`: the same flows, run blocking or on an event loop; `lisa.send`."""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from datetime import timedelta, tzinfo
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from lisa.core.model.addresses import KUBERNETES_VARIABLE
from lisa.core.model.clock import option_duration
from lisa.core.model.durability import Replicas
from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.model.keys import Keys, check_topic
from lisa.core.model.middleware import SEND, BaseMiddleware, checked, load, methods
from lisa.core.model.options import PRODUCER_RETRY_TIME
from lisa.core.redis.address import Address
from lisa.core.redis.connection import AsyncConnection, Connection
from lisa.core.redis.flow import Await, Flow, awaiting, blocking, drive, rename_inherited
from lisa.core.store.batcher import Batcher, Deadline
from lisa.core.store.store import AsyncStore, Store, SyncStore
from lisa.core.transitions.change import Cancel, Cancelled
from lisa.core.transitions.enqueue import OnDuplicate, SendOutcome, Sent
from lisa.producer.calls import (
    SendCall,
    SendReport,
    Single,
    async_pieces,
    check_iterable,
    combine,
    fitting,
    pieces,
)
from lisa.producer.flows import Flows, Sending
from lisa.producer.plan import SendOptions, SendPlan

if TYPE_CHECKING:
    from django.db.transaction import Atomic
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    from lisa.producer.on_commit import OnCommit

T = TypeVar("T")


class BaseProducer(Sending, ABC):
    """The constructor of all producers.

    server: an `Address` or its URL; by default LISA_REDIS_URL, or else redis://localhost:6379/0.
        The producer connects at the first call.
    prefix: the first part of every key, the same for all roles of a system; by default
        LISA_PREFIX, or else `lisa`.
    zone: the zone for naive datetimes, an IANA name or an offset; without it they are refused.
    patience: how long a call is repeated while the server does not answer: a timedelta, or text
        with a unit (`"10s"`), as in every parameter that is a duration. A value above 10 s
        requires topics with a retention of at least twice as much; the first send checks this.
    durability: `replicas(n)`: a write returns once n replicas have it, or raises NotReplicated
        after `patience`. By default only the primary confirms.
    middleware: objects whose `send`, or `send_async`, is called around each send; the first one is
        the outermost. `send_many` and `send_stream` call it for each 250 messages.
    """

    _form: str
    _clock: Callable[[], float] = staticmethod(monotonic)
    """The clock of delays that begin before the send, in seconds; see `on_commit`."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Let Python's errors about the constructor's arguments name the public class."""
        super().__init_subclass__(**options)
        rename_inherited(cls, ["__init__"])

    def __init__(
        self,
        server: str | Address | None = None,
        *,
        prefix: str | None = None,
        zone: tzinfo | str | None = None,
        patience: timedelta | str = PRODUCER_RETRY_TIME,
        durability: Replicas | None = None,
        middleware: Iterable[BaseMiddleware] = (),
    ) -> None:
        if durability is not None and not isinstance(durability, Replicas):
            raise ConfigError(f"durability is None or made by replicas(n), not {durability!r}")
        patience = option_duration("patience", patience)
        address = Address.of(server).answering_within(patience.total_seconds())
        store = self._store_on(address, Keys.of(prefix), patience)
        super().__init__(
            store,
            zone=zone,
            patience=patience,
            durability=durability,
            middleware=methods(checked(middleware), SEND, self._form, type(self).__name__),
        )

    @staticmethod
    @abstractmethod
    def _store_on(address: Address, keys: Keys, patience: timedelta) -> Store:
        """Create the store that runs this producer's flows."""

    @classmethod
    def from_config(
        cls,
        path: Path | str | None = None,
        *,
        middleware: Iterable[BaseMiddleware] = (),
        **overrides: Any,
    ) -> Self:
        """Create a producer from the YAML file at `path` or `LISA_CONFIG` and `LISA_*` variables.

        `overrides` are keys of the file and take precedence: `redis="redis://..."`, `prefix=`,
        `zone=`, `patience=`. `middleware` comes after that of the file. Raises ConfigError with a
        one-line message.
        """
        # Imported late: constructing a producer directly should not load pydantic.
        from lisa.core.settings import ProducerSettings

        settings = ProducerSettings.load(path, **overrides)
        settings.require_enabled()
        address = Address.from_settings(settings.redis)
        return cls(
            address,
            prefix=settings.prefix,
            zone=settings.zone,
            patience=settings.patience,
            durability=settings.durability,
            middleware=[*load(settings.middleware), *middleware],
        )


class Producer(BaseProducer):
    """Sends, cancels, reschedules and looks up messages. Threads may share a producer.

    A context manager. The producer connects at the first call.
    """

    _store: SyncStore
    _form = "send"

    send = blocking(Flows.send)
    send_one = blocking(Flows.send_one)
    send_many = blocking(Flows.send_many)
    cancel = blocking(Flows.cancel)
    cancel_many = blocking(Flows.cancel_many)
    reschedule = blocking(Flows.reschedule)
    fire_now = blocking(Flows.fire_now)
    get = blocking(Flows.get)
    list_key = blocking(Flows.list_key)
    count_key = blocking(Flows.count_key)
    cancel_key = blocking(Flows.cancel_key)
    reschedule_key = blocking(Flows.reschedule_key)
    fire_key = blocking(Flows.fire_key)
    schedule = blocking(Flows.schedule)
    schedules = blocking(Flows.schedules)
    get_schedule = blocking(Flows.get_schedule)
    pause_schedule = blocking(Flows.pause_schedule)
    resume_schedule = blocking(Flows.resume_schedule)
    remove_schedule = blocking(Flows.remove_schedule)
    run_schedule = blocking(Flows.run_schedule)
    next_ticks = blocking(Flows.next_ticks)
    backfill_schedule = blocking(Flows.backfill_schedule)

    @staticmethod
    def _store_on(address: Address, keys: Keys, patience: timedelta) -> SyncStore:
        return SyncStore(Connection(address), keys, patience, who="producer")

    def _drive(self, flow: Flow[T]) -> T:
        return drive(flow, self._store.connection)

    def send_stream(
        self, topic: str, bodies: Iterable[Any], **options: Unpack[SendOptions]
    ) -> Iterator[SendOutcome]:
        """`send_many` in constant memory: draws and sends bodies as outcomes are consumed.

        Bodies that are not drawn are not sent: iterate to the end.
        """
        check_iterable(bodies, "bodies")
        SendPlan.of(options, self._zone)
        return self._stream(check_topic(topic), bodies, options)

    def _stream(
        self, topic: str, bodies: Iterable[Any], options: SendOptions
    ) -> Iterator[SendOutcome]:
        for piece in pieces(bodies):
            yield from self._drive(self._piece(SendCall(topic, piece, options)))

    def on_commit(
        self, transaction: Session | scoped_session[Any] | Atomic | str | None = None
    ) -> OnCommit:
        """Calls that are made once a database transaction is committed, or never.

        transaction: a `Session` of SQLAlchemy; or of Django, `atomic()` or the alias of a database,
            by default that of "default". A call outside any transaction begins one of the session;
            in Django it is made at once.

            with Session(engine) as session, session.begin():
                session.add(order)
                producer.on_commit(session).send("order-timeouts", {"order": 42}, delay="30m")

        If the process dies between the commit and the call, the call is never made.
        """
        from lisa.producer.on_commit import OnCommit  # late: few programs use it

        return OnCommit(self, transaction, self._zone, self._clock)

    def close(self) -> None:
        """Close the connections; a later call opens them again."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncProducer(BaseProducer):
    """Asynchronous version of `Producer`, for the tasks of one event loop.

    An asynchronous context manager. A call in another event loop than that of the first call raises
    RuntimeError, unless the producer was closed in between.
    """

    _store: AsyncStore
    _form = "send_async"
    _loop: asyncio.AbstractEventLoop | None = None
    _deadline: Deadline | None = None

    send = awaiting(Flows.send)
    send_one = awaiting(Flows.send_one)
    send_many = awaiting(Flows.send_many)
    cancel = awaiting(Flows.cancel)
    cancel_many = awaiting(Flows.cancel_many)
    reschedule = awaiting(Flows.reschedule)
    fire_now = awaiting(Flows.fire_now)
    get = awaiting(Flows.get)
    list_key = awaiting(Flows.list_key)
    count_key = awaiting(Flows.count_key)
    cancel_key = awaiting(Flows.cancel_key)
    reschedule_key = awaiting(Flows.reschedule_key)
    fire_key = awaiting(Flows.fire_key)
    schedule = awaiting(Flows.schedule)
    schedules = awaiting(Flows.schedules)
    get_schedule = awaiting(Flows.get_schedule)
    pause_schedule = awaiting(Flows.pause_schedule)
    resume_schedule = awaiting(Flows.resume_schedule)
    remove_schedule = awaiting(Flows.remove_schedule)
    run_schedule = awaiting(Flows.run_schedule)
    next_ticks = awaiting(Flows.next_ticks)
    backfill_schedule = awaiting(Flows.backfill_schedule)

    @staticmethod
    def _store_on(address: Address, keys: Keys, patience: timedelta) -> AsyncStore:
        return AsyncStore(AsyncConnection(address), keys, patience, who="producer")

    async def _drive(self, flow: Flow[T]) -> T:
        if asyncio.get_running_loop() is not self._loop:
            self._belong_to_this_loop()
        return await self._store.drive(flow)

    def _belong_to_this_loop(self) -> None:
        """Raise RuntimeError if the producer belongs to another event loop."""
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise RuntimeError(
                "this AsyncProducer belongs to the event loop of its first call, and this is "
                "another one: create a producer in each loop, or close() it at the loop's end"
            )
        self._loop = loop

    @cached_property
    def _sends(self) -> Batcher[tuple[str, OnDuplicate], Single, SendOutcome]:
        return Batcher(self._send_together, self._count_sends, self._deadline)

    @cached_property
    def _cancels(self) -> Batcher[str, str, Cancelled]:
        return Batcher(self._cancel_together, self._count_cancels, self._deadline)

    def _send_one(
        self, topic: str, on_duplicate: OnDuplicate, message: Single
    ) -> Flow[SendOutcome]:
        sent: SendOutcome = yield Await(self._sends.call((topic, on_duplicate), message))
        return sent

    async def _send_together(
        self,
        key: tuple[str, OnDuplicate],
        messages: Sequence[Single],
        known: list[SendOutcome | None],
        token: str | None = None,
    ) -> None:
        report, whole = SendReport(), combine(messages)
        try:
            await self._drive(self._enqueue(*key, whole, report, token))
        except LisaError as error:
            known += report
            # Some shards accepted their messages: do not send those again.
            known += [
                SendOutcome(message_id, outcome) if isinstance(outcome, Sent) else outcome
                for message_id, outcome in zip(
                    whole.ids[len(report) :], error.outcomes, strict=False
                )
            ]
            raise
        known += report

    def _count_sends(self, _: tuple[str, OnDuplicate], messages: Iterable[Single]) -> int:
        return fitting(len(message.tail) for message in messages)

    def _cancel_one(self, topic: str, message_id: str) -> Flow[Cancelled]:
        result: Cancelled = yield Await(self._cancels.call(topic, message_id))
        return result

    async def _cancel_together(
        self, topic: str, ids: Sequence[str], known: list[Cancelled | None]
    ) -> None:
        known += await self._drive(self._cancel(topic, ids))

    def _count_cancels(self, topic: str, ids: Iterable[str]) -> int:
        return fitting(map(len, ids), self._store.batch_size(topic, Cancel))

    def send_stream(
        self, topic: str, bodies: Iterable[Any] | AsyncIterable[Any], **options: Unpack[SendOptions]
    ) -> AsyncIterator[SendOutcome]:
        """`send_many` in constant memory: draws and sends bodies as outcomes are consumed.

        Bodies that are not drawn are not sent: iterate to the end. Items of an asynchronous source
        are held until they fill a script call or the source ends.
        """
        check_iterable(bodies, "bodies")
        SendPlan.of(options, self._zone)
        return self._stream(check_topic(topic), bodies, options)

    async def _stream(
        self, topic: str, bodies: Iterable[Any] | AsyncIterable[Any], options: SendOptions
    ) -> AsyncIterator[SendOutcome]:
        async for piece in async_pieces(bodies):
            for outcome in await self._drive(self._piece(SendCall(topic, piece, options))):
                yield outcome

    def on_commit(self, session: AsyncSession | async_scoped_session[Any]) -> OnCommit:
        """Calls that are made once the transaction of a session of SQLAlchemy is committed.

        Its methods are not coroutines: `await session.commit()` makes the calls, all of them also
        if it is cancelled meanwhile. Otherwise like `Producer.on_commit`.
        """
        from lisa.producer.on_commit import OnCommit  # late: as in `Producer`

        current = session() if callable(session) else session  # if scoped
        return OnCommit(self, current.sync_session, self._zone, self._clock)

    async def close(self) -> None:
        """Send what is still queued and close the connections; a later call reconnects.

        If this is cancelled, calls that still wait are cancelled, too.
        """
        self._belong_to_this_loop()
        try:
            await self._sends.finish()
            await self._cancels.finish()
        finally:
            self._sends.cancel()
            self._cancels.cancel()
            for task in list(self._watch.running):
                task.cancel()
            await self._store.close()
            self._loop = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


P = ParamSpec("P")
_READ_WITHOUT_SETTINGS = ("LISA_REDIS_URL", "LISA_PREFIX")


def _configured() -> Producer:
    """A producer; loads the settings, and with them pydantic, only if a variable needs it."""
    for name, value in os.environ.items():
        is_known = name in _READ_WITHOUT_SETTINGS or re.fullmatch(KUBERNETES_VARIABLE, name)
        if name.startswith("LISA_") and value.strip() and not is_known:
            return Producer.from_config()
    return Producer()


class _Shared:
    """Creates the producer once, in the first thread that needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._producer: Producer | None = None

    def producer(self) -> Producer:
        with self._lock:
            if self._producer is None:
                self._producer = _configured()
                atexit.register(self.close)
            return self._producer

    def close(self) -> None:
        with self._lock:
            producer, self._producer = self._producer, None
        if producer is not None:
            atexit.unregister(self.close)
            producer.close()


_shared = _Shared()


def _on_shared(method: Callable[Concatenate[Producer, P], T]) -> Callable[P, T]:
    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return method(_shared.producer(), *args, **kwargs)

    signature = inspect.signature(method)
    shown = list(signature.parameters.values())[1:]  # without self
    call.__dict__["__signature__"] = signature.replace(parameters=shown)
    return call


send = _on_shared(Producer.send)
send_one = _on_shared(Producer.send_one)
send_many = _on_shared(Producer.send_many)
send_stream = _on_shared(Producer.send_stream)
cancel = _on_shared(Producer.cancel)
cancel_many = _on_shared(Producer.cancel_many)
reschedule = _on_shared(Producer.reschedule)
on_commit = _on_shared(Producer.on_commit)
fire_now = _on_shared(Producer.fire_now)
get = _on_shared(Producer.get)
list_key = _on_shared(Producer.list_key)
count_key = _on_shared(Producer.count_key)
cancel_key = _on_shared(Producer.cancel_key)
reschedule_key = _on_shared(Producer.reschedule_key)
fire_key = _on_shared(Producer.fire_key)
schedule = _on_shared(Producer.schedule)
schedules = _on_shared(Producer.schedules)
get_schedule = _on_shared(Producer.get_schedule)
pause_schedule = _on_shared(Producer.pause_schedule)
resume_schedule = _on_shared(Producer.resume_schedule)
remove_schedule = _on_shared(Producer.remove_schedule)
run_schedule = _on_shared(Producer.run_schedule)
next_ticks = _on_shared(Producer.next_ticks)
backfill_schedule = _on_shared(Producer.backfill_schedule)


def close() -> None:
    """Close the shared producer; the next call creates a new one and reads the settings again."""
    _shared.close()
