"""Shared by the tests of split topics."""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from lisa import Producer
from lisa.admin import fsck, groups, topics
from lisa.admin.fsck import CheckReport
from lisa.core.model.keys import TopicKeys
from lisa.core.model.sharding import Layout, Topic
from lisa.core.redis.flow import Command, Execute, Flow, Pause
from lisa.core.transitions.base import text
from lisa.core.transitions.topic import Configure
from lisa.manager.expirer import Expirer
from lisa.manager.sharder import Sharder
from lisa.manager.signal_queue import SignalQueue
from lisa.manager.sweeper import Sweeper
from tests.scripts import all_versions
from tests.servers import open_store

ORDERS = Topic("orders")
SENT = 12


class Split:
    """One topic as its operator and an outside program see it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = open_store(url, timedelta(seconds=5))
        self.ask, self.drive = self.store.ask, self.store.drive

    def into(self, shards: int) -> Layout:
        self.drive(topics.set_options(self.store, "orders", {"shards": shards}))
        return self.layout

    def add_group(self, group: str = "lisa") -> bool:
        return self.drive(groups.add(self.store, "orders", group))

    def check(self, *, repair: bool = False) -> CheckReport:
        return self.drive(fsck.check(self.store, ["orders"], repair=repair))

    @property
    def layout(self) -> Layout:
        return self.drive(self.store.layout(ORDERS))

    def keys(self, shard: str = "orders") -> TopicKeys:
        return self.store.keys.topic(shard)

    def waiting(self) -> dict[str, set[str]]:
        """The waiting ids by shard, over all shards ever used."""
        found = {
            shard: set(map(text, self.ask("ZRANGE", self.keys(shard).waiting, 0, -1)))
            for shard in self.layout.counted(ORDERS)
        }
        return {shard: ids for shard, ids in found.items() if ids}

    def copies(self) -> list[str]:
        """All waiting ids; an id in two shards is listed twice."""
        return sorted(one for ids in self.waiting().values() for one in ids)

    def accepts(self, shard: str) -> int:
        return int(self.ask("HGET", self.keys(shard).options, "accepts") or 0)

    def declared(self) -> set[tuple[str, ...]]:
        """The groups of all shards."""
        return {self.drive(self.store.groups(shard)) for shard in self.layout.counted(ORDERS)}

    def marks(self) -> list[str]:
        """The shards that a removal of the group `lisa` has not finished."""
        return [
            shard
            for shard in self.layout.counted(ORDERS)
            if self.ask("HEXISTS", self.keys(shard).options, "removing:lisa")
        ]

    def sweep(self) -> None:
        """Sweep at a later time, when all marks are old."""
        for shard in self.marks():
            self.store.call(Configure(shard, {"removing:lisa": "1"}))
        sweeper = Sweeper(self.store, Expirer(self.store, SignalQueue(self.store)), lambda _: True)
        for shard in self.layout.counted(ORDERS):
            sweeper.step(shard)

    def step(self, times: int = 1) -> None:
        """Let a manager look after the layout."""
        for _ in range(times):
            Sharder(self.store).step(ORDERS)

    def send_all(self) -> None:
        """Send `SENT` messages that are due."""
        with Producer(self.url) as producer:
            producer.send_many("orders", range(SENT))

    def owed(self) -> int:
        """How many messages the group `lisa` has not settled, in all shards."""
        return self.drive(groups.unsettled_in_all(self.store, "orders", "lisa"))


class Halting:
    """A flow run in parts, so that it can be abandoned or interleaved with others."""

    def __init__(self, flow: Flow[Any], split: Split) -> None:
        self._flow = flow
        self._connection = split.store.connection
        self.step: Any = next(flow)

    def run_until(self, halts: Callable[[Command], bool]) -> bool:
        """Run up to the first matching command, which is not sent; true if the flow ended."""
        with suppress(StopIteration):
            while True:
                if isinstance(self.step, Pause):
                    self.step = self._flow.send(None)
                    continue
                many = not isinstance(self.step, Execute)
                replies = []
                for command in self.step.commands if many else [self.step.command]:
                    if halts(command):
                        return False
                    replies += self._connection.execute_many([command])
                if not many and isinstance(replies[0], Exception):
                    self.step = self._flow.throw(replies[0])
                else:
                    self.step = self._flow.send(replies if many else replies[0])
        return True

    def halt_at(self, *words: str) -> None:
        """Run up to a command with these words, which has to come."""
        assert not self.run_until(lambda command: set(words) <= set(command))

    def finish(self) -> None:
        assert self.run_until(lambda _: False)


def run_steps(flow: Flow[Any], split: Split, count: int) -> bool:
    """Send the first `count` script calls of a flow, then stop; true if the flow ended."""
    sent = 0

    def halts(command: Command) -> bool:
        nonlocal sent
        sent += command[0] == "EVALSHA"
        return sent > count

    for script in all_versions():  # else loading adds calls
        split.ask("SCRIPT", "LOAD", script.source)
    return Halting(flow, split).run_until(halts)
