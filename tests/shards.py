"""What the tests of topics that are split share."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from lisa.admin import topics
from lisa.core.address import Address
from lisa.core.connection import Connection
from lisa.core.keys import Keys
from lisa.core.store import SyncStore
from lisa.core.transitions.base import text

if TYPE_CHECKING:
    from lisa.core.keys import TopicKeys
    from lisa.core.shards import Layout


class Split:
    """One topic as its operator, and a foreign hand, see it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = SyncStore(Connection(Address(url)), Keys(), timedelta(seconds=5))

    def into(self, shards: int) -> Layout:
        self.store.drive(topics.set_options(self.store, "orders", {"shards": shards}))
        return self.layout

    @property
    def layout(self) -> Layout:
        return self.store.drive(self.store.layout("orders"))

    def keys(self, place: str) -> TopicKeys:
        return self.store.keys.topic(place)

    def waiting(self) -> dict[str, set[str]]:
        """The ids that wait, by place, of all places ever used."""
        found = {
            place: set(map(text, self.store.ask("ZRANGE", self.keys(place).waiting, 0, -1)))
            for place in self.layout.counted("orders")
        }
        return {place: ids for place, ids in found.items() if ids}

    def copies(self) -> list[str]:
        """All ids that wait; one that stands in two places comes twice."""
        return sorted(one for ids in self.waiting().values() for one in ids)

    def accepts(self, place: str) -> int:
        return int(self.store.ask("HGET", self.keys(place).options, "accepts") or 0)
