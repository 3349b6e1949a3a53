"""The two producers: the same flows, run blocking or on an event loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from datetime import timedelta, tzinfo
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from lisa.core.address import DEFAULT_URL, Address
from lisa.core.connection import AsyncConnection, Connection
from lisa.core.durability import Replicas
from lisa.core.errors import ConfigError, LisaError
from lisa.core.flow import Await, Flow, awaiting, blocking
from lisa.core.keys import DEFAULT_PREFIX, Keys, check_topic
from lisa.core.options import PRODUCER_RETRY_TIME
from lisa.core.store import AsyncStore, Store, SyncStore
from lisa.core.transitions.cancel import Cancel, Cancelled
from lisa.core.transitions.enqueue import Enqueue, OnDuplicate
from lisa.producer.calls import Single, check_iterable, fitting, pieces, together
from lisa.producer.flows import Flows, Sending
from lisa.producer.gathering import Gathering
from lisa.producer.plan import Plan, SendOptions
from lisa.producer.report import SendOutcome, SendReport

__all__ = ["AsyncProducer", "Producer"]

T = TypeVar("T")


class _Configured(Sending, ABC):
    """What both constructors take.

    server: an `Address`, or its URL; nothing is connected before the first call.
    prefix: the first part of every key, the same for all roles of a system.
    zone: of datetimes that name none, an IANA name or an offset; without it they are refused.
    patience: how long a call is repeated while the server does not answer. Longer than 10 s it
        needs topics with a retention of at least twice as much, which is checked.
    durability: `replicas(n)`: a call that writes returns once so many replicas have it, or raises
        NotReplicated after `patience`. Without it the primary alone decides.
    """

    def __init__(
        self,
        server: str | Address = DEFAULT_URL,
        *,
        prefix: str = DEFAULT_PREFIX,
        zone: tzinfo | str | None = None,
        patience: timedelta = PRODUCER_RETRY_TIME,
        durability: Replicas | None = None,
    ) -> None:
        if durability is not None and not isinstance(durability, Replicas):
            raise ConfigError(f"durability is None or made by replicas(n), not {durability!r}")
        if not isinstance(patience, timedelta) or patience < timedelta(0):
            raise ConfigError(f"patience is a timedelta of at least 0, not {patience!r}")
        store = self._store_on(Address.of(server), Keys(prefix), patience)
        super().__init__(store, zone=zone, patience=patience, durability=durability)

    @staticmethod
    @abstractmethod
    def _store_on(address: Address, keys: Keys, patience: timedelta) -> Store:
        """The store that runs this producer's flows."""

    @classmethod
    def from_config(cls, path: Path | str | None = None, **overrides: Any) -> Self:
        """A producer as the YAML at `path` (else at `LISA_CONFIG`, if set) and `LISA_*` say.

        `overrides` are keys of the file, above both: `redis="redis://..."`, `prefix=`, `zone=`.
        Raises ConfigError, in one line.
        """
        # Imported late: who names the server outright need not pay for pydantic.
        from lisa.core.settings import ProducerSettings

        settings = ProducerSettings.load(path, **overrides)
        settings.require_enabled()
        address = Address.from_settings(settings.redis)
        return cls(
            address, prefix=settings.prefix, zone=settings.zone, durability=settings.durability
        )


class Producer(_Configured):
    """Sends messages, takes them back, moves and finds them. Threads may share one.

    A context manager; nothing is connected before the first call.
    """

    _store: SyncStore

    send = blocking(Flows.send)
    send_many = blocking(Flows.send_many)
    cancel = blocking(Flows.cancel)
    cancel_many = blocking(Flows.cancel_many)
    reschedule = blocking(Flows.reschedule)
    fire_now = blocking(Flows.fire_now)
    get = blocking(Flows.get)

    @staticmethod
    def _store_on(address: Address, keys: Keys, patience: timedelta) -> SyncStore:
        return SyncStore(Connection(address), keys, patience, who="producer")

    def _drive(self, flow: Flow[T]) -> T:
        return self._store.drive(flow)

    def send_stream(
        self, topic: str, bodies: Iterable[Any], **options: Unpack[SendOptions]
    ) -> Iterator[SendOutcome]:
        """`send_many` in constant memory: draws bodies and sends as its outcomes are asked for.

        Nothing is sent that is not drawn: iterate it to the end.
        """
        check_iterable(bodies, "bodies")
        plan = Plan.of(options, self._zone)
        return self._stream(check_topic(topic), plan, bodies)

    def _stream(self, topic: str, plan: Plan, bodies: Iterable[Any]) -> Iterator[SendOutcome]:
        for piece in pieces(bodies, lambda: self._store.batch_size(topic, Enqueue)):
            yield from self._drive(self._piece(topic, plan, piece))

    def close(self) -> None:
        """Close the connections; a later call opens them again."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncProducer(_Configured):
    """The same with `await`, for tasks of one event loop. An asynchronous context manager."""

    _store: AsyncStore

    send = awaiting(Flows.send)
    send_many = awaiting(Flows.send_many)
    cancel = awaiting(Flows.cancel)
    cancel_many = awaiting(Flows.cancel_many)
    reschedule = awaiting(Flows.reschedule)
    fire_now = awaiting(Flows.fire_now)
    get = awaiting(Flows.get)

    @staticmethod
    def _store_on(address: Address, keys: Keys, patience: timedelta) -> AsyncStore:
        return AsyncStore(AsyncConnection(address), keys, patience, who="producer")

    async def _drive(self, flow: Flow[T]) -> T:
        return await self._store.drive(flow)

    @cached_property
    def _sends(self) -> Gathering[tuple[str, OnDuplicate], Single, SendOutcome]:
        return Gathering(self._send_together, self._count_sends)

    @cached_property
    def _cancels(self) -> Gathering[str, str, Cancelled]:
        return Gathering(self._cancel_together, self._count_cancels)

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
    ) -> None:
        report, whole = SendReport(), together(messages)
        try:
            await self._drive(self._enqueue(*key, whole, report))
        except LisaError as error:
            known += report
            # Of a call that some shards refused, the rest is sent, and must not be sent again.
            ids = whole.ids[len(report) :]
            known += [
                None if outcome is None else SendOutcome(one, outcome)
                for one, outcome in zip(ids, error.outcomes, strict=False)
            ]
            raise
        known += report

    def _count_sends(self, key: tuple[str, OnDuplicate], messages: Iterable[Single]) -> int:
        lengths = (len(message.tail) for message in messages)
        return fitting(lengths, self._store.batch_size(key[0], Enqueue))

    def _cancel_one(self, topic: str, message_id: str) -> Flow[Cancelled]:
        truth: Cancelled = yield Await(self._cancels.call(topic, message_id))
        return truth

    async def _cancel_together(
        self, topic: str, ids: Sequence[str], known: list[Cancelled | None]
    ) -> None:
        known += await self._drive(self._cancel(topic, ids))

    def _count_cancels(self, topic: str, ids: Iterable[str]) -> int:
        return fitting(map(len, ids), self._store.batch_size(topic, Cancel))

    def send_stream(
        self, topic: str, bodies: Iterable[Any] | AsyncIterable[Any], **options: Unpack[SendOptions]
    ) -> AsyncIterator[SendOutcome]:
        """`send_many` in constant memory: draws bodies and sends as its outcomes are asked for.

        Nothing is sent that is not drawn: iterate it to the end. An asynchronous source is held
        up until a script call is full, or it ends.
        """
        check_iterable(bodies, "bodies")
        plan = Plan.of(options, self._zone)
        return self._stream(check_topic(topic), plan, bodies)

    async def _stream(
        self, topic: str, plan: Plan, bodies: Iterable[Any] | AsyncIterable[Any]
    ) -> AsyncIterator[SendOutcome]:
        async for piece in _async_pieces(bodies, lambda: self._store.batch_size(topic, Enqueue)):
            for outcome in await self._drive(self._piece(topic, plan, piece)):
                yield outcome

    async def close(self) -> None:
        """Send what still waits, and close the connections; a later call opens them again."""
        await self._sends.finish()
        await self._cancels.finish()
        await self._store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


async def _async_pieces(
    items: Iterable[T] | AsyncIterable[T], size: Callable[[], int]
) -> AsyncIterator[list[T]]:
    if not isinstance(items, AsyncIterable):
        for piece in pieces(items, size):
            yield piece
        return
    held: list[T] = []
    async for item in items:
        held.append(item)
        if len(held) >= size():
            yield held
            held = []
    if held:
        yield held
