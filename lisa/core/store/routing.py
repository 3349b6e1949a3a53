"""Finds the shard of each message of a topic that is split.

A shard refuses sends and calls by id from clients that use a layout other than its own. A client
therefore needs no initial query, and an answer "unknown" always comes from the right shard. Shards
of older layouts are asked as well: after the current one, or before it where an id must not be
accepted twice. A shard remembers the messages settled there even if the id is live again in an
older shard, so only a live message is a final answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from lisa.core.model.durability import Replicas
from lisa.core.model.errors import InvalidMessage, LisaError, Misplaced, TopicFull
from lisa.core.model.sharding import PLAIN, Layout, Shard, Topic, own_shard, topic_of
from lisa.core.redis.flow import Flow, Pause
from lisa.core.store.runner import Runner
from lisa.core.transitions.base import ById, Elsewhere, Transition

if TYPE_CHECKING:
    from datetime import timedelta

    from lisa.core.model.keys import Keys
    from lisa.core.redis.patience import Patience

T = TypeVar("T")
R = TypeVar("R")

UNSPLIT = str(PLAIN.number)

LAYOUT_AGE_S = 1.0
"""Maximum age of a layout that callers follow without a write to tell them of a change."""

MOST_REMEMBERED = 10_000
"""Topics whose time of the last read is kept."""


class Router(Runner):
    """Caches topic layouts and runs transitions on the shards of their messages."""

    def __init__(self, keys: Keys, where: str, patience: timedelta, who: str) -> None:
        super().__init__(keys, where, patience, who)
        self._layouts: dict[Topic, Layout] = {}
        self._layout_read: dict[Topic, float] = {}

    def run_by_id(self, transition: ById[T], durability: Replicas | None = None) -> Flow[list[T]]:
        """Run a transition for each of its messages, on the shard that holds the message.

        With `durability` the call returns once that many replicas have the write, and otherwise
        raises NotReplicated. If only some shards refuse, `outcomes` of the error holds the results
        of the other messages.
        """
        topic, patience, results = Topic(transition.topic), self.patience(), list[T]()
        layout = self.known_layout(topic)
        if layout is None:
            try:
                results = yield from self.run_at(transition, UNSPLIT, patience, durability)
            except Misplaced:
                transition = transition.with_known_ids()
            else:
                if transition.checks_layout or not any(map(transition.is_nowhere, results)):
                    return results
            layout = yield from self.layout(topic)
            if results and not layout.number:
                return results
        search = _Search(
            self, transition, layout, results, patience=patience, durability=durability
        )
        return (yield from search.run())

    def layout(self, topic: Topic) -> Flow[Layout]:
        """Read the layout of a topic from the server."""
        return (yield from self.layouts([topic]))[0]

    def layouts(self, topics: Sequence[Topic]) -> Flow[list[Layout]]:
        """Read the layouts of many topics from the server, in the same order."""
        if not topics:
            return []
        replies = yield from self.commands(
            [("HGET", self.keys.topic(topic).options, "layout") for topic in topics]
        )
        found = list(map(Layout.read, replies))
        for topic, layout in zip(topics, found, strict=True):
            self.learn_layout(topic, layout)
        return found

    def recent_layout(self, topic: Topic) -> Flow[Layout]:
        """A topic's layout, read from the server at most once in `LAYOUT_AGE_S`."""
        now = time.monotonic()
        if now - self._layout_read.get(topic, -math.inf) > LAYOUT_AGE_S:
            if len(self._layout_read) >= MOST_REMEMBERED:
                self._layout_read.clear()
            self._layout_read[topic] = now
            yield from self.layout(topic)
        return self.known_layout(topic) or PLAIN

    def known_layout(self, topic: Topic) -> Layout | None:
        """The last known layout, without asking the server; None if none is known."""
        return self._layouts.get(topic)

    def learn_layout(self, topic: Topic, layout: Layout) -> None:
        """Remember a topic's layout."""
        if layout.number:
            self._layouts[topic] = layout
        else:
            self._layouts.pop(topic, None)

    def forget(self, shard: str) -> None:
        """Drop what is known of a shard, and of its topic if it is the topic's own."""
        self._groups.pop(shard, None)
        if shard == own_shard(topic := topic_of(shard)):
            self._layouts.pop(topic, None)
            self._layout_read.pop(topic, None)


class _Search(Generic[T]):
    """The messages of one transition and their results so far."""

    def __init__(
        self,
        store: Router,
        transition: ById[T],
        layout: Layout,
        known: Sequence[T],
        *,
        patience: Patience,
        durability: Replicas | None,
    ) -> None:
        self._store = store
        self._transition = transition
        self._topic = topic_of(transition.topic)
        self._layout = layout
        self._patience = patience
        self._durability = durability
        self._ids = transition.message_ids
        self._results: list[T | None] = list(known) or [None] * len(self._ids)
        self._settled_before: set[int] = set()
        self._misplaced: set[int] = set()
        self._failed: set[int] = set()
        self._error: LisaError | None = None

    def run(self) -> Flow[list[T]]:
        """Repeat until every message has its result. Raises LisaError."""
        todo = self._open()
        while True:
            yield from self._round(todo)
            misplaced = sorted(self._misplaced)
            if self._error is not None and not (misplaced and _refuses(self._error)):
                self._error.outcomes = self._results
                raise self._error
            before = self._layout
            if misplaced or (not self._transition.checks_layout and self._open()):
                self._layout = yield from self._store.layout(self._topic)
            if self._layout == before:
                if not misplaced:
                    return self._results  # type: ignore[return-value]  # every result is set
                pause = self._patience.next_pause()
                if pause is None:
                    error = Misplaced(
                        f"the shards of topic {self._topic!r} are being changed and no manager "
                        "finished the change in time; check that a manager is running"
                    )
                    error.outcomes = self._results
                    raise error
                yield Pause(pause)
            # A failed call may have reached a shard that has become an older one.
            self._transition = self._transition.with_known_ids()
            todo = misplaced or self._open()

    def _open(self) -> list[int]:
        """The messages without a result, or not found so far."""
        is_nowhere = self._transition.is_nowhere
        return [i for i, result in enumerate(self._results) if result is None or is_nowhere(result)]

    def _round(self, todo: list[int]) -> Flow[None]:
        """Ask the shards of one layout; a shard with another layout refuses."""
        layout, when = self._layout, self._transition.asks_older
        self._misplaced, asked = set(), todo
        if when == "first":
            asked = yield from self._ask_older_first(todo)
        yield from self._ask(asked, layout.shards, str(layout.number))
        if when == "after":
            for count in layout.older:
                yield from self._ask_older(todo, count)

    def _answered(self, todo: Sequence[int]) -> list[int]:
        """The messages whose shards all answered."""
        return [i for i in todo if i not in self._misplaced and i not in self._failed]

    def _ask_older_first(self, todo: list[int]) -> Flow[list[int]]:
        """Ask the older shards, which must all be closed. Returns the unresolved messages."""
        closed = f"-{self._layout.number}"
        for count in self._layout.older:
            picks = self._by_shard(todo, count)
            calls = [self._transition.first_of(shard, some) for shard, some in picks.items()]
            results = yield from self._run(calls, list(picks.values()), closed, self._durability)
            for i, result in results:
                if result is Elsewhere.SETTLED:
                    self._settled_before.add(i)
                elif not isinstance(result, Elsewhere):
                    self._results[i] = result
            todo = [i for i in self._answered(todo) if self._results[i] is None]
        return todo

    def _ask_older(self, todo: list[int], count: int) -> Flow[None]:
        """Ask older shards about missing messages, and about settled ids that may be live there."""
        nowhere, asked = set(self._open()), self._answered(todo)
        settled = [i for i in asked if i not in nowhere and self._may_be_settled(i)]
        picks = self._by_shard(settled, count)
        from lisa.core.transitions.inspect import Inspect  # late: only for split topics

        looks = [
            Inspect(shard, [self._ids[i] for i in some], bodies=False)
            for shard, some in picks.items()
        ]
        seen = yield from self._run(looks, list(picks.values()))
        live = {i for i, found in seen if found.envelope}
        yield from self._ask([i for i in asked if i in nowhere or i in live], count, "")

    def _may_be_settled(self, i: int) -> bool:
        result = self._results[i]
        return result is not None and self._transition.may_be_settled(result)

    def _ask(self, todo: list[int], count: int, layout: str) -> Flow[None]:
        """Run the transition on the shards of one count."""
        transition, picks = self._transition, self._by_shard(todo, count)
        calls = [transition.part(shard, some) for shard, some in picks.items()]
        results = yield from self._run(calls, list(picks.values()), layout, self._durability)
        for i, result in results:
            if self._results[i] is None or not transition.is_nowhere(result):
                revived = i in self._settled_before
                self._results[i] = transition.revived(result) if revived else result

    def _by_shard(self, todo: Sequence[int], count: int) -> dict[Shard, list[int]]:
        found: dict[Shard, list[int]] = {}
        for i in todo:
            found.setdefault(self._layout.shard_for(self._topic, self._ids[i], count), []).append(i)
        return found

    def _run(
        self,
        calls: Sequence[Transition[list[R]]],
        picks: Sequence[list[int]],
        layout: str = "",
        durability: Replicas | None = None,
    ) -> Flow[list[tuple[int, R]]]:
        """Run calls together. Returns results by message, without those of shards that refused.

        A refused message stays unresolved: it may be in that shard, so no other one may take it.
        """
        if not calls:
            return []
        results: list[tuple[int, R]] = []
        replies = yield from self._replies(calls, layout, durability)
        for some, reply in zip(picks, replies, strict=True):
            if isinstance(reply, Misplaced):
                self._misplaced.update(some)
            elif isinstance(reply, LisaError):
                # Prefer an error that does not rule out a write.
                if self._error is None or (_refuses(self._error) and not _refuses(reply)):
                    self._error = reply
                self._failed.update(some)
                for i in some:
                    self._results[i] = None
            else:
                results += zip(some, reply, strict=True)
        return results

    def _replies(
        self, calls: Sequence[Transition[list[R]]], layout: str, durability: Replicas | None
    ) -> Flow[list[list[R] | LisaError]]:
        if len(calls) > 1 and durability is None:
            return (yield from self._store.run_many(calls, layout, self._patience))
        replies: list[list[R] | LisaError] = []
        for call in calls:  # replicas confirm on the connection of the write
            try:
                reply = yield from self._store.run_at(call, layout, self._patience, durability)
                replies.append(reply)
            except LisaError as error:
                replies.append(error)
        return replies


def _refuses(error: LisaError) -> bool:
    """Whether the error guarantees that the shard wrote nothing of that call."""
    return isinstance(error, (InvalidMessage, TopicFull))
