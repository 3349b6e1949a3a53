"""What the consumer's tests share: a small stand-in for the manager, and ways to look inside."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lisa.core import presence
from lisa.core.address import Address
from lisa.core.connection import Connection
from lisa.core.envelope import encode_envelope, new_id, new_token
from lisa.core.errors import LisaError
from lisa.core.keys import Keys
from lisa.core.options import encode
from lisa.core.store import SyncStore, chunks
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.inspect import Inspect, Inspection
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.reclaim import FIRST, Reclaim
from tests.rows import Item, enqueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from lisa.consumer import Consumer
    from lisa.core.message import Message

STEP_S = 0.01


class Bench:
    """Sends, promotes, reclaims and looks, by the transitions alone."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = SyncStore(Connection(Address(url)), Keys(), timedelta(seconds=2))

    def declare(self, topic: str, group: str = "lisa", **options: object) -> None:
        """A topic's group and options."""
        self.store.drive(self.store.check_schema())
        self.store.call(Declare(topic, group))
        if options:
            self.store.call(Configure(topic, encode(options)))

    def configure(self, topic: str, **options: object) -> None:
        """A topic's options."""
        self.store.call(Configure(topic, encode(options)))

    def send(
        self, topic: str, bodies: Iterable[object], *, delay_ms: int = 0, ttl_ms: int | None = None
    ) -> list[str]:
        """Send bodies; their ids."""
        token = new_token()
        items = [
            Item(new_id(), f"+{delay_ms}", encode_envelope(token, body), ttl_ms=ttl_ms)
            for body in bodies
        ]
        for some in chunks(items, 250):
            self.store.call(enqueue(topic, token, some))
        return [item.id for item in items]

    def inspect(self, topic: str, message_id: str) -> Inspection:
        """Where a message stands."""
        return self.store.call(Inspect(topic, [message_id]))[0]

    def settled_as(self, topic: str, message_id: str) -> str | None:
        """The state in its tombstone."""
        stone = self.inspect(topic, message_id).tombstone
        return stone.state if stone else None

    def places(self, topic: str, message_id: str) -> list[str]:
        """The states in which groups have it."""
        return [place.state for place in self.inspect(topic, message_id).places]

    def stat(self, topic: str, name: str, group: str = "lisa") -> int:
        """One counter of a group."""
        return self.stats(topic).get(f"{name}@{group}", 0)

    def stats(self, topic: str) -> dict[str, int]:
        """All counters of a topic."""
        return self.store.drive(self.store.stats(topic))

    def ask(self, *command: Any) -> Any:
        """A plain command."""
        return self.store.ask(*command)

    @contextmanager
    def manager(self, *topics: str) -> Iterator[None]:
        """Promote and reclaim every 10 ms, for as long as the block runs."""
        ended = threading.Event()

        def work() -> None:
            store = SyncStore(Connection(Address(self.url)), Keys(), timedelta(seconds=1))
            while not ended.wait(STEP_S):
                for topic in topics:
                    with suppress(LisaError):
                        manage(store, topic)
            store.close()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def ignore(message: Message) -> None:
    """A handler that is content with anything."""


def presences(bench: Bench, topic: str = "orders") -> list[presence.ConsumerPresence]:
    """The consumers' records of a topic."""
    return bench.store.drive(presence.consumers(bench.store, topic))


def presences_running(bench: Bench, topic: str = "orders") -> Callable[[], bool]:
    """Whether one consumer reads the topic."""
    return lambda: [one.state for one in presences(bench, topic)] == ["running"]


def settled(bench: Bench, message_id: str, topic: str = "orders") -> Callable[[], bool]:
    """Whether a message was acked."""
    return lambda: bench.settled_as(topic, message_id) == "acked"


def state_of(consumer: Consumer, topic: str = "orders") -> str:
    """The state that a consumer reports of a topic and the group lisa."""
    return str(consumer.health()["topics"].get(f"{topic}/lisa", {}).get("state"))


def manage(store: SyncStore, topic: str) -> None:
    """One round of a manager."""
    store.call(Promote(topic))
    for group in store.drive(store.groups(topic)):
        start: str | None = FIRST
        while start is not None:
            start = store.call(Reclaim(topic, group, start)).cursor
