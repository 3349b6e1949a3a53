"""Shared by the consumer's tests: a small fake manager, and ways to inspect state."""

import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

from blinker import Signal

from lisa.consumer import Consumer
from lisa.core.model.envelope import encode_envelope, new_id, new_token
from lisa.core.model.errors import LisaError
from lisa.core.model.message import Message
from lisa.core.model.options import encode
from lisa.core.store import presence
from lisa.core.store.store import SyncStore, chunks
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.inspect import Inspect, Inspection
from lisa.core.transitions.lease import FIRST, Reclaim
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.topic import Configure
from tests.rows import Item, enqueue
from tests.servers import open_store, wait_until

STEP_S = 0.01


class Bench:
    """Sends, promotes, reclaims and inspects, with single transitions."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = open_store(url, timedelta(seconds=2))

    def declare(self, topic: str, group: str = "lisa", **options: object) -> None:
        """Declare the topic's group and set its options."""
        self.store.drive(self.store.check_schema())
        self.store.call(Declare(topic, group))
        if options:
            self.store.call(Configure(topic, encode(options)))

    def consumer(
        self, handler: Callable[..., Any], topic: str = "orders", **options: Any
    ) -> Consumer:
        """A consumer with one handler."""
        consumer = Consumer(self.url, **options)
        consumer.on(topic, handler)
        return consumer

    def declare_all(self, *topics: str, **options: Any) -> None:
        """Declare the group `lisa` of several topics."""
        for topic in topics:
            self.declare(topic, **options)

    def recorder(self, topic: str = "orders", **options: Any) -> tuple[Consumer, list[Any]]:
        """A consumer whose handler records the bodies of messages, and the list of these."""
        seen: list[Any] = []
        return self.consumer(lambda message: seen.append(message.body), topic, **options), seen

    def configure(self, topic: str, **options: object) -> None:
        """Set the topic's options."""
        self.store.call(Configure(topic, encode(options)))

    def send(
        self, topic: str, bodies: Iterable[object], *, delay_ms: int = 0, ttl_ms: int | None = None
    ) -> list[str]:
        """Send bodies; returns their ids."""
        token = new_token()
        items = [
            Item(new_id(), f"+{delay_ms}", encode_envelope(token, body), ttl_ms=ttl_ms)
            for body in bodies
        ]
        for part in chunks(items, 250):
            self.store.call(enqueue(topic, token, part))
        return [item.id for item in items]

    def inspect(self, topic: str, message_id: str) -> Inspection:
        """The state of a message."""
        return self.store.call(Inspect(topic, [message_id]))[0]

    def settled_as(self, topic: str, message_id: str) -> str | None:
        """The state in the message's tombstone."""
        stone = self.inspect(topic, message_id).tombstone
        return stone.state if stone else None

    def states(self, topic: str, message_id: str) -> list[str]:
        """The message's state in each group that has it."""
        return [found.state for found in self.inspect(topic, message_id).group_states]

    def stat(self, topic: str, name: str, group: str = "lisa") -> int:
        """One counter of a group."""
        return self.stats(topic).get(f"{name}@{group}", 0)

    def stats(self, topic: str) -> dict[str, int]:
        """All counters of a topic."""
        return self.store.drive(self.store.stats(topic))

    def wait_acked(self, count: int, *topics: str, group: str = "lisa") -> None:
        """Wait until so many messages of each topic are acked."""
        wait_until(
            lambda: all(self.stat(topic, "acked", group) == count for topic in topics or ["orders"])
        )

    def ready(self, topic: str, group: str = "lisa") -> str:
        """The key of a group's stream."""
        return self.store.keys.topic(topic).group(group).ready

    def pending(self, topic: str, group: str = "lisa") -> int:
        """The number of a group's deliveries that are not settled."""
        count: int = self.ask("XPENDING", self.ready(topic, group), group)[0]
        return count

    def is_reading(self) -> bool:
        """Whether a blocking read waits for messages."""
        clients = self.ask("CLIENT", "LIST").decode().splitlines()
        return any("cmd=xreadgroup" in client and "flags=b" in client for client in clients)

    def calls_of(self, command: str) -> int:
        """How often the server ran a command."""
        stats = self.ask("INFO", "commandstats").decode()
        return sum(map(int, re.findall(rf"cmdstat_{command}:calls=(\d+)", stats)))

    def ask(self, *command: Any) -> Any:
        """Run a plain command."""
        return self.store.ask(*command)

    @contextmanager
    def manager(self, *topics: str) -> Iterator[None]:
        """Promote and reclaim every 10 ms while the block runs."""
        ended = threading.Event()

        def work() -> None:
            store = open_store(self.url, timedelta(seconds=1))
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


class Blocking:
    """A handler that records bodies, and holds those of `bodies`, or all, until `go_on` is set."""

    def __init__(self, *bodies: object) -> None:
        self.bodies = bodies
        self.begun: list[Any] = []
        self.go_on = threading.Event()

    def __call__(self, message: Message) -> None:
        self.begun.append(message.body)
        if not self.bodies or message.body in self.bodies:
            self.go_on.wait(60)


@contextmanager
def refused_threads(name: str, times: float = math.inf) -> Iterator[list[str]]:
    """No thread of that name can be started, as at the thread limit; gives the refusals."""
    start, refused = threading.Thread.start, list[str]()

    def starting(thread: threading.Thread) -> None:
        if thread.name == name and len(refused) < times:
            refused.append(name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with patch.object(threading.Thread, "start", starting):
        yield refused


def ignore(message: Message) -> None:
    """A handler that accepts anything."""


def heard(signal: Signal) -> list[Message]:
    """The messages of a signal from now on."""
    found: list[Message] = []

    def hear(_topic: str, *, message: Message) -> None:
        found.append(message)

    signal.connect(hear, weak=False)
    return found


def presences(bench: Bench, topic: str = "orders") -> list[presence.ConsumerPresence]:
    """The consumers' records of a topic."""
    return bench.store.drive(presence.consumers(bench.store, topic))


def presences_running(bench: Bench, topic: str = "orders") -> Callable[[], bool]:
    """Whether exactly one consumer reads the topic."""
    return lambda: [one.state for one in presences(bench, topic)] == ["running"]


def settled(bench: Bench, message_id: str, topic: str = "orders") -> Callable[[], bool]:
    """Whether a message was acked."""
    return lambda: bench.settled_as(topic, message_id) == "acked"


def state_of(consumer: Consumer, topic: str = "orders", group: str = "lisa") -> str:
    """The state that a consumer reports for a topic and a group."""
    return str(consumer.health()["topics"].get(f"{topic}/{group}", {}).get("state"))


def manage(store: SyncStore, topic: str) -> None:
    """Run one round of a manager."""
    store.call(Promote(topic))
    for group in store.drive(store.groups(topic)):
        start: str | None = FIRST
        while start is not None:
            start = store.call(Reclaim(topic, group, start)).cursor
