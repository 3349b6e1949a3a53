"""Shared by the tests of split topics."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from lisa import Producer
from lisa.admin import groups, topics
from lisa.core.model.keys import TopicKeys
from lisa.core.model.sharding import Layout, Topic
from lisa.core.redis.flow import Command, Execute, Flow, Pause
from lisa.core.transitions import loader
from lisa.core.transitions.base import text
from tests.servers import open_store

ORDERS = Topic("orders")
SENT = 12


class Split:
    """One topic as its operator and an outside program see it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = open_store(url, timedelta(seconds=5))

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

    def send_all(self) -> None:
        """Send `SENT` messages that are due."""
        with Producer(self.url) as producer:
            producer.send_many("orders", range(SENT))

    def owed(self) -> int:
        """How many messages the group `lisa` has not settled, in all shards."""
        return self.store.drive(groups.unsettled_in_all(self.store, "orders", "lisa"))


class Halting:
    """A flow run in parts, so that it can be abandoned or interleaved with others."""

    def __init__(self, flow: Flow[Any], split: Split) -> None:
        self._flow = flow
        self._connection = split.store.connection
        self._step: Any = next(flow)

    def run_until(self, halts: Callable[[Command], bool]) -> bool:
        """Run up to the first matching command, which is not sent; true if the flow ended."""
        with suppress(StopIteration):
            while True:
                if isinstance(self._step, Pause):
                    self._step = self._flow.send(None)
                    continue
                many = not isinstance(self._step, Execute)
                replies = []
                for command in self._step.commands if many else [self._step.command]:
                    if halts(command):
                        return False
                    replies += self._connection.execute_many([command])
                if not many and isinstance(replies[0], Exception):
                    self._step = self._flow.throw(replies[0])
                else:
                    self._step = self._flow.send(replies if many else replies[0])
        return True


def run_steps(flow: Flow[Any], split: Split, count: int) -> bool:
    """Send the first `count` script calls of a flow, then stop; true if the flow ended."""
    sent = 0

    def halts(command: Command) -> bool:
        nonlocal sent
        sent += command[0] == "EVALSHA"
        return sent > count

    for name in loader.names():  # else loading adds calls
        split.store.ask("SCRIPT", "LOAD", loader.load(name).source)
    return Halting(flow, split).run_until(halts)
