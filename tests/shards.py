"""Shared by the tests of split topics."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from lisa.admin import topics
from lisa.core.model.keys import Keys
from lisa.core.model.sharding import Topic
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.store.store import SyncStore
from lisa.core.transitions.base import text

if TYPE_CHECKING:
    from lisa.core.model.keys import TopicKeys
    from lisa.core.model.sharding import Layout

ORDERS = Topic("orders")


class Split:
    """One topic as its operator and an outside program see it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = SyncStore(Connection(Address(url)), Keys(), timedelta(seconds=5))

    def into(self, shards: int) -> Layout:
        self.store.drive(topics.set_options(self.store, "orders", {"shards": shards}))
        return self.layout

    @property
    def layout(self) -> Layout:
        return self.store.drive(self.store.layout(ORDERS))

    def keys(self, shard: str) -> TopicKeys:
        return self.store.keys.topic(shard)

    def waiting(self) -> dict[str, set[str]]:
        """The waiting ids by shard, over all shards ever used."""
        found = {
            shard: set(map(text, self.store.ask("ZRANGE", self.keys(shard).waiting, 0, -1)))
            for shard in self.layout.counted(ORDERS)
        }
        return {shard: ids for shard, ids in found.items() if ids}

    def copies(self) -> list[str]:
        """All waiting ids; an id in two shards is listed twice."""
        return sorted(one for ids in self.waiting().values() for one in ids)

    def accepts(self, shard: str) -> int:
        return int(self.store.ask("HGET", self.keys(shard).options, "accepts") or 0)
