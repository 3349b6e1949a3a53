"""A bench for testing a script's contract: one empty topic on one server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

from lisa.core.model.envelope import encode_envelope, fence_of
from lisa.core.model.stream import Entry
from lisa.core.store.store import SyncStore
from lisa.core.transitions.ack import Settlement
from lisa.core.transitions.base import Transition
from lisa.core.transitions.enqueue import OnDuplicate, Sent
from tests.contract import state as states
from tests.rows import Item, enqueue

T = TypeVar("T")
TOPIC = "orders"


class Near:
    """Equal to any time between the bench's start and now, shifted by an offset."""

    def __init__(self, bench: Bench, offset: int = 0) -> None:
        self._bench = bench
        self._offset = offset

    def __add__(self, ms: int) -> Near:
        return Near(self._bench, self._offset + ms)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, int | float):
            return NotImplemented
        return self._bench.start <= other - self._offset <= self._bench.clock() + 1

    __hash__ = None  # type: ignore[assignment]  # equal to many numbers, so it has no hash

    def __repr__(self) -> str:
        return f"<now{self._offset:+d} ms>"


class Receipts(ABC):
    """Receipts of deliveries, whose entries and clock a subclass provides."""

    @abstractmethod
    def entry(self, message_id: str, group: str = "lisa") -> str:
        """The id of the message's entry."""

    @abstractmethod
    def clock(self) -> int:
        """Redis's clock in ms, rounded down."""

    def receipt(self, message_id: str, group: str = "lisa") -> tuple[str, str]:
        return (message_id, self.entry(message_id, group))

    def opening(self, message_id: str, group: str = "lisa") -> Entry:
        """The entry as a consumer reads it."""
        return Entry(self.entry(message_id, group), message_id, 0, 1)

    def settlement(
        self,
        message_id: str,
        *,
        group: str = "lisa",
        entry: str | None = None,
        fence: str = "AAAAAAAA-",
        due: int = 0,
        attempt: int = 1,
        lateness: str = "c",
    ) -> Settlement:
        entry = entry or self.entry(message_id, group)
        return Settlement(message_id, entry, fence, due, attempt, lateness)


class Bench(Receipts):
    """One empty topic on one server."""

    def __init__(self, store: SyncStore) -> None:
        self.store = store
        self.keys = store.keys.topic(TOPIC)
        self.start = self.clock()
        self.now = Near(self)
        self._parts: dict[str, Any] = {}

    def clock(self) -> int:
        seconds, micros = self.store.ask("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def call(self, transition: Transition[T]) -> T:
        return self.store.call(transition)

    def put(self, **parts: Any) -> None:
        """Write a state (see `state.topic`)."""
        states.put(self.store, TOPIC, states.topic(**parts))
        self._parts |= parts

    def state(self) -> states.State:
        return states.read(self.store, TOPIC)

    def check(self, **parts: Any) -> None:
        """Assert that the whole key space equals this state."""
        assert self.state() == states.expected(**parts)
        self._parts = parts

    def check_change(self, **parts: Any) -> None:
        """Assert that only these parts differ from the state written or checked before."""
        self.check(**(self._parts | parts))

    def check_unchanged(self) -> None:
        self.check_change()

    def entry(self, message_id: str, group: str = "lisa") -> str:
        found: bytes = self.store.ask("HGET", self.keys.group(group).entries, message_id)
        return found.decode()

    def send(
        self,
        *items: Item,
        on_duplicate: OnDuplicate = OnDuplicate.KEEP,
        are_ids_new: bool = False,
    ) -> list[Sent]:
        """Send with the first item's token."""
        token = fence_of(items[0].envelope)[:8]
        return self.call(enqueue(TOPIC, token, items, on_duplicate, are_ids_new=are_ids_new))


def item(
    message_id: str,
    due: str | int,
    body: str = "",
    *,
    sender: str = "A",
    ttl_ms: int | None = None,
    policy: str | None = None,
) -> Item:
    """One message of a call; its send token is the letter `sender` eight times."""
    return Item(message_id, str(due), encode_envelope(sender * 8, body), ttl_ms, policy)
