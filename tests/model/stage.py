"""The server and the model side by side: each step runs on both, and both must agree."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from lisa.admin import fsck
from lisa.core.model.errors import GroupRemoved, InvalidMessage, RemovalUnfinished, TopicFull
from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.store.store import SyncStore
from lisa.core.transitions.base import Transition
from lisa.producer import Producer
from tests.model.keyspace import read
from tests.model.rendering import NEVER, render
from tests.model.sending import Refused
from tests.model.topic import Group, Topic
from tests.model.unknowns import Clock, differences
from tests.servers import flush

MANY = 100  # larger numbers are not counts
WORD = re.compile(r"[a-z_: ]{4,}\Z")
REFUSALS = {
    TopicFull: "full",
    InvalidMessage: "large",
    GroupRemoved: "no such group",
    RemovalUnfinished: "removal unfinished",
}


class Stage:
    """An emptied server, its expected data, and how often each answer was given."""

    def __init__(self, url: str, seen: Counter[str]) -> None:
        flush(url)
        # Two stores learn of groups at different times, as roles in different processes do.
        self.stores = [SyncStore(Connection(Address(url)), Keys()) for _ in range(2)]
        self.producer = Producer(url)
        self.topics: dict[str, Topic] = {}
        self.seen = seen
        self.has_failed = False
        self._turn = 0

    def close(self) -> None:
        self.producer.close()
        for store in self.stores:
            store.close()

    @property
    def store(self) -> SyncStore:
        """One of the stores, in turn."""
        self._turn += 1
        return self.stores[self._turn % 2]

    def topic(self, name: str) -> Topic:
        """A topic, registered for managers (and fsck) on first use."""
        if name not in self.topics:
            self.stores[0].ask("ZADD", self.stores[0].keys.topics, 1, name)
            self.topics[name] = Topic(name)
        return self.topics[name]

    def call(
        self,
        transition: Transition[Any],
        model: Callable[[Clock], Any],
        read_answer: Callable[[Any], Any] = lambda answer: answer,
    ) -> Any:
        """Run a transition on both. Returns the model's answer; AssertionError if they differ."""
        store = self.store
        name = type(transition).__name__
        expected = self.step(
            name, lambda: read_answer(store.call(transition)), model, actor=store.actor
        )
        if transition.script != "open":
            self._repeat(transition, read_answer, expected)
        return expected

    def _repeat(
        self, transition: Transition[Any], read_answer: Callable[[Any], Any], expected: Any
    ) -> None:
        """Repeat a recorded call, as after a lost reply: nothing changes."""
        store = self.store
        record = store.keys.topic(transition.topic).reply(transition.call_id)
        if not transition.call_id or not store.ask("EXISTS", record):
            return
        again = _answer(lambda: read_answer(store.call(transition)))
        _, seen = read(self.stores[0].connection)
        wrong = differences(expected, again, "answer") + differences(self.rendered(), seen)
        self.has_failed = bool(wrong)
        name = type(transition).__name__
        assert not wrong, "\n".join([f"after {name} was repeated:", *wrong])
        self.seen[f"{name} repeated"] += 1

    def step(
        self, name: str, server: Callable[[], Any], model: Callable[[Clock], Any], *, actor: str
    ) -> Any:
        """Run one step on both; compare the answers, then the whole key space."""
        before = self._now_us()
        answer = _answer(server)
        after, seen = read(self.stores[0].connection)
        clock = Clock(before, after, actor)
        expected = _answer(lambda: model(clock))
        wrong = differences(expected, answer, "answer") + differences(self.rendered(), seen)
        self.has_failed = bool(wrong)
        assert not wrong, "\n".join([f"after {name}:", *wrong])
        self.seen["steps"] += 1
        for said in words(answer) or [""]:
            self.seen[f"{name} {said}".strip()] += 1
        return expected

    def rendered(self) -> dict[str, Any]:
        """The key space according to the model."""
        expected: dict[str, Any] = {
            "lisa:schema": ("string", "1", NEVER),
            "lisa:topics": ("zset", dict.fromkeys(self.topics, 1), NEVER),
        }
        for topic in self.topics.values():
            expected |= render(topic)
        return expected

    def group(self, topic: Topic, name: str) -> Group:
        """A declared group of the model."""
        if name not in topic.declared:
            raise Refused("no such group")
        return topic.all_groups[name]

    def check_with_fsck(self, names: list[str]) -> None:
        """Check that fsck finds nothing either."""
        report = self.stores[0].drive(fsck.check(self.stores[0], names))
        assert report.total == 0, report.findings

    def _now_us(self) -> int:
        seconds, micros = self.stores[0].connection.execute(("TIME",))
        return int(seconds) * 1_000_000 + int(micros)


def words(answer: Any) -> list[str]:
    """An answer in words, for the list of answers reached."""
    if isinstance(answer, list | tuple):
        return [word for one in answer for word in words(one)]
    if isinstance(answer, str):
        return [answer] if WORD.match(answer) else []
    return [str(bool(answer))] if isinstance(answer, int) and answer < MANY else []


def _answer(do: Callable[[], Any]) -> Any:
    try:
        return do()
    except Refused as refused:
        return f"refused: {refused}"
    except tuple(REFUSALS) as error:
        return f"refused: {REFUSALS[type(error)]}"


def check_places(topic: Topic) -> None:
    """Check that each live message waits, or is in one place of each group that owes it."""
    for group in topic.groups:
        indexed = [entry.id for entry in group.stream if entry.is_ours]
        placed = [*indexed, *group.retry, *group.garbage]
        assert len(placed) == len(set(placed)), f"in two places of {group.name}: {placed}"
        assert not set(placed) & topic.waiting.keys(), "waiting, and owed"
    owed = {id_ for id_ in topic.live if topic.is_owed(id_)}
    assert owed | topic.waiting.keys() == topic.live.keys()
    assert topic.policy.keys() | topic.expiry.keys() <= topic.live.keys()
