"""Which topics there are, and what the configuration declares about them.

Each place of a topic that is split is served as a topic by itself; the configuration knows only the
whole.

Topics are those of the configuration, those that producers registered, and those that a search
over the keys finds. Options and groups are declared when the manager meets the server, and again
when the server turns out to be another or an emptied one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from lisa.core.errors import LisaError, ServerUnavailable
from lisa.core.keys import is_place
from lisa.core.shards import base
from lisa.core.spread import spread
from lisa.core.store import SyncStore, pairs
from lisa.core.transitions.base import text
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.declare import Declare
from lisa.manager.plan import Plan, TopicPlan
from lisa.manager.troubles import Troubles

__all__ = ["Registry"]

SEARCH_PAGE = 1_000
_DECLARED = "declared:"  # a declared option's second field in the options hash, see configure

log = logging.getLogger(__name__)


class Registry:
    """The topics of one manager. `learnt` is called with each topic that is new to it."""

    def __init__(self, store: SyncStore, plan: Plan, learnt: Callable[[str], None]) -> None:
        self.plan = plan
        self.troubles = Troubles("registry")
        self._store = store
        self._learnt = learnt
        self._lock = threading.Lock()
        self._topics: set[str] = set()
        self._undeclared: set[str] = set(plan.topics)

    @property
    def topics(self) -> list[str]:
        """All topics known now."""
        with self._lock:
            return sorted(self._topics)

    def is_kept(self, place: str) -> bool:
        """Whether it stays listed, used or not: configured, or part of a topic that is split."""
        layout = self._store.known_layout(base(place))
        if base(place) != place:
            return layout is not None and place in layout.places(base(place))
        return place in self.plan.topics or (layout is not None and layout.is_split)

    def batch(self, topic: str) -> int:
        """How many messages one promote call may move."""
        return self.plan.batch(base(topic))

    def learn(self, topics: Iterable[str]) -> None:
        """Take notice of topics; what cannot be one is passed over."""
        for topic in topics:
            if not is_place(topic):
                continue
            with self._lock:
                new = topic not in self._topics
                self._topics.add(topic)
            if new:
                self._learnt(topic)

    def forget(self, topic: str) -> None:
        """Take notice of a topic no more, until it turns up again."""
        with self._lock:
            self._topics.discard(topic)

    def declare_again(self) -> None:
        """The server is another one, or was emptied: everything is to be declared anew."""
        with self._lock:
            self._undeclared = set(self.plan.topics)

    def step(self) -> None:
        """Learn which topics are registered, and declare what is not yet. Raises LisaError."""
        # Learning comes first: a server at maxmemory takes no declaration, yet has to be drained.
        self.learn(self.plan.topics)
        places = self._store.drive(self._store.places())
        self.learn({*places, *map(base, places)})
        with self._lock:
            undeclared = sorted(self._undeclared)
        if undeclared:
            self._store.drive(self._store.register(undeclared))
        for topic in undeclared:
            try:
                self._declare(topic, self.plan.topics.get(topic, TopicPlan()))
            except LisaError as error:
                self.troubles.failed(topic, error)
                continue
            self.troubles.passed(topic)
            with self._lock:
                self._undeclared.discard(topic)

    def search(self) -> None:
        """Find topics by their keys, whatever became of the list of them. Raises LisaError.

        On a cluster all nodes are looked through, one after the other; at the end it raises what
        kept one from answering.
        """
        pattern = self._store.keys.structure_pattern()
        cursor, found, failed = 0, set[str](), None
        while True:
            try:
                reply, page = self._store.ask(
                    "SCAN", cursor, "MATCH", pattern, "COUNT", SEARCH_PAGE
                )
            except ServerUnavailable as error:
                failed = error
                cursor = self._store.connection.behind(cursor)
            else:
                found.update(topic for key in page if (topic := self._topic_owing(text(key))))
                cursor = int(reply)
            if not cursor:
                break
        lost = sorted(found - set(self.topics))
        if lost:
            log.info("found topics that were not listed: %s", ", ".join(lost))
            self._store.drive(self._store.register(lost))
            self.learn(lost)
        if failed is not None:
            raise failed

    def _topic_owing(self, key: str) -> str | None:
        """The topic of a key that holds messages; options, counters and streams outlive them."""
        topic = self._store.keys.topic_of(key)
        if topic is None:
            return None
        keys = self._store.keys.topic(topic)
        group = keys.group_of(key)
        holds = key != keys.group(group).ready if group else key == keys.waiting
        return topic if holds else None

    def reconfigure(self, plan: Plan) -> list[str]:
        """Follow another configuration from now on; what changed, in words."""
        said = _differences(self.plan, plan)
        with self._lock:
            self.plan = plan
            self._undeclared |= set(plan.topics)
        return said

    def _declare(self, topic: str, plan: TopicPlan) -> None:
        if plan.options is not None:
            stored = pairs(self._store.ask("HGETALL", self._store.keys.topic(topic).options))
            names = {text(field) for field in stored}
            earlier = {name[len(_DECLARED) :] for name in names if name.startswith(_DECLARED)}
            # What an earlier configuration declared and this one no longer says is taken back.
            values: dict[str, str | None] = dict.fromkeys(sorted(earlier - plan.options.keys()))
            values |= plan.options
            changed = self._store.call(Configure(topic, values, declared=True)) if values else 0
            if changed:
                log.info("topic %s: %d options declared", topic, changed, extra={"topic": topic})
        for group in plan.groups:
            if self._store.call(Declare(topic, group)):
                log.info("topic %s: group %s declared", topic, group,
                         extra={"topic": topic, "group": group})  # fmt: skip
        self._store.drive(spread(self._store, topic))


def _differences(old: Plan, new: Plan) -> list[str]:
    said = []
    for topic in sorted({*old.topics, *new.topics}):
        if topic not in new.topics:
            said.append(f"topic {topic}: no longer configured; what it holds stays")
            continue
        before, after = old.topics.get(topic, TopicPlan()), new.topics[topic]
        was, now = before.options or {}, after.options or {}
        if topic not in old.topics:
            said.append(f"topic {topic}: new")
        said += [
            f"topic {topic}: {name} {was.get(name, 'default')} -> {now.get(name, 'default')}"
            for name in sorted({*was, *now})
            if was.get(name) != now.get(name)
        ]
        said += [f"topic {topic}: group {name} added" for name in after.groups
                 if name not in before.groups]  # fmt: skip
        said += [f"topic {topic}: group {name} no longer named; `lisa topic group remove` "
                 "takes it away" for name in before.groups if name not in after.groups]  # fmt: skip
        if before.batch != after.batch:
            said.append(f"topic {topic}: moving-size {before.batch} -> {after.batch}")
    return said
