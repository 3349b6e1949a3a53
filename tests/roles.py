"""Producer and consumer made of single transitions, and the manager's services one by one."""

from __future__ import annotations

from collections.abc import Sequence

from lisa.core.model.envelope import encode_envelope, fence_of, new_id, new_token
from lisa.core.model.options import TopicOptions
from lisa.core.model.stream import Entry, parse_reads, read_all_command
from lisa.core.store.store import SyncStore
from lisa.core.transitions.ack import Ack, Acked, Settlement
from lisa.core.transitions.change import Reschedule
from lisa.core.transitions.delivery import Open, Opened
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.inspect import Inspect, Inspection
from lisa.core.transitions.retry import Fail, Failure
from lisa.core.transitions.topic import Configure
from lisa.manager.expirer import Expirer
from lisa.manager.promoter import Promoter
from lisa.manager.reclaimer import Reclaimer
from lisa.manager.sampler import Sampler
from lisa.manager.server_clock import ServerClock
from lisa.manager.signal_queue import SignalQueue
from lisa.manager.sweeper import Sweeper
from lisa.manager.trimmer import Trimmer
from tests.rows import Item, enqueue
from tests.servers import open_store, wait_until


class Cast:
    """Acts on one topic and group; `declare` declares the group."""

    def __init__(
        self, url: str, topic: str = "orders", group: str = "g", store: SyncStore | None = None
    ) -> None:
        self.url = url
        self.store = store or open_store(url)
        self.ask, self.drive = self.store.ask, self.store.drive
        self.topic = topic
        self.group = group
        self.keys = self.store.keys.topic(topic)
        self.own = self.keys.group(group)

    def on(self, topic: str, group: str | None = None) -> Cast:
        """The same for another topic or group, with the same connections."""
        return Cast(self.url, topic, group or self.group, self.store)

    def declare(self, **options: str) -> Cast:
        self.drive(self.store.check_schema())
        self.store.call(Declare(self.topic, self.group))
        if options:
            self.configure(**options)
        return self

    def configure(self, **options: str) -> None:
        self.store.call(Configure(self.topic, dict(options)))

    def options(self) -> TopicOptions:
        return self.drive(self.store.options(self.topic))

    def groups(self) -> tuple[str, ...]:
        return self.drive(self.store.groups(self.topic))

    def now_ms(self) -> int:
        return self.drive(self.store.server_time_ms())

    def send(
        self,
        body: object = "x",
        *,
        delay_ms: int = 0,
        message_id: str | None = None,
        ttl_ms: int | None = None,
        policy: str | None = None,
        window: str | None = None,
    ) -> str:
        token, message_id = new_token(), message_id or new_id()
        headers = None if window is None else {"lisa-window": window}
        envelope = encode_envelope(token, body, headers)
        item = Item(message_id, f"+{delay_ms}", envelope, ttl_ms, policy)
        self.store.drive(self.store.register([self.topic]))
        self.store.call(enqueue(self.topic, token, [item]))
        return message_id

    def send_due(self, *, message_id: str | None = None, ttl_ms: int | None = None) -> str:
        """Send a message that is due but still waits: it was sent for later, then fired."""
        sent = self.send(delay_ms=60_000, message_id=message_id, ttl_ms=ttl_ms)
        self.store.call(Reschedule(self.topic, [(sent, "+0")]))
        return sent

    def send_late(self, policy: str) -> str:
        """Send a message with its own late policy; it waits since the beginning of 1970."""
        sent = self.send(delay_ms=60_000, policy=policy)
        self.store.call(Reschedule(self.topic, [(sent, "1")]))
        return sent

    def read(self, count: int = 100, *, block_ms: int = 0, consumer: str = "c1") -> list[Entry]:
        command = read_all_command([self.own.ready], self.group, consumer, count, block_ms)
        return [entry for _, entries in parse_reads(self.store.ask(*command)) for entry in entries]

    def await_entries(self, count: int = 1) -> list[Entry]:
        """Read until so many entries came."""
        found: list[Entry] = []

        def came() -> bool:
            found.extend(self.read(block_ms=200))
            return len(found) >= count

        wait_until(came)
        return found

    def open(self, entries: list[Entry]) -> Opened:
        return self.store.call(Open(self.topic, self.group, entries))

    def take(self, count: int = 100, *, consumer: str = "c1") -> list[Entry]:
        """Read and open, as a consumer does."""
        entries = self.read(count, consumer=consumer)
        if entries:
            self.open(entries)
        return entries

    def ack(self, entry: Entry) -> Acked:
        inspection = self.look(entry.id)
        fence = fence_of(inspection.envelope) if inspection.envelope else "-" * 9
        settlement = Settlement(entry.id, entry.entry, fence, entry.due_ms, entry.attempt)
        return self.store.call(Ack(self.topic, self.group, [settlement]))[0]

    def discard(self, entry: Entry) -> None:
        self.store.call(
            Fail(self.topic, self.group, [Failure(entry.id, entry.entry, "no", "discard")])
        )

    def look(self, message_id: str) -> Inspection:
        return self.store.call(Inspect(self.topic, [message_id]))[0]

    def state(self, message_id: str) -> str:
        """waiting, the state in the one group that has it, that of the tombstone, or unknown."""
        return self.states([message_id])[0]

    def states(self, message_ids: Sequence[str]) -> list[str]:
        """The states of several messages."""
        return [_state(one) for one in self.store.call(Inspect(self.topic, message_ids))]

    def stats(self) -> dict[str, int]:
        return self.drive(self.store.stats(self.topic))


def _state(found: Inspection) -> str:
    if found.waiting_due_ms is not None:
        return "waiting"
    if found.group_states:
        return found.group_states[0].state
    return found.tombstone.state if found.tombstone else "unknown"


class Services:
    """The manager's services on one cast's store; none of them runs on its own."""

    def __init__(self, cast: Cast) -> None:
        self.store = store = cast.store
        self.clock = ServerClock()
        self.clock.sample(store)
        self.announcer = SignalQueue(store)
        expirer = Expirer(store, self.announcer)
        self.promoter = Promoter(store, self.clock, expirer, {cast.topic: 100})
        self.reclaimer = Reclaimer(store, self.clock, self.announcer, 10)
        self.trimmer = Trimmer(store)
        self.sweeper = Sweeper(store, expirer, lambda topic: topic == "configured")
        self.sampler = Sampler(store)
