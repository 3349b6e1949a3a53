"""Finds the place of each message of a topic that is split over shards.

A place refuses new messages, and every call that names them by id, from those who know another
layout than itself. So who knows nothing of shards needs no question first, and an answer that says
"unknown" is known to come from the right place. Places of an older layout are asked as well: after
the present one, or, where an id must not be taken twice, before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from lisa.core.durability import Replicas
from lisa.core.errors import LisaError, Misplaced
from lisa.core.flow import Flow, Pause
from lisa.core.shards import PLAIN, Layout, base
from lisa.core.transitions.base import ById, Elsewhere, Transition

if TYPE_CHECKING:
    from lisa.core.store import Store

__all__ = ["by_id"]

T = TypeVar("T")
R = TypeVar("R")

UNSPLIT = str(PLAIN.number)


def by_id(store: Store, transition: ById[T], durability: Replicas | None = None) -> Flow[list[T]]:
    """See `Store.run_by_id`."""
    topic = transition.topic
    layout = store.known_layout(topic)
    if layout is not None:
        return (yield from _Search(store, transition, layout, durability).run())
    try:
        results = yield from store.run_at(transition, UNSPLIT, durability)
    except Misplaced:
        layout = yield from store.layout(topic)
        return (yield from _Search(store, transition.with_known_ids(), layout, durability).run())
    if transition.minds_layout or not any(map(transition.is_nowhere, results)):
        return results
    layout = yield from store.layout(topic)
    if not layout.number:
        return results
    return (yield from _Search(store, transition, layout, durability, results).run())


class _Search(Generic[T]):
    """One transition's messages, and what is known of each so far."""

    def __init__(
        self,
        store: Store,
        transition: ById[T],
        layout: Layout,
        durability: Replicas | None,
        known: Sequence[T] = (),
    ) -> None:
        self._store = store
        self._transition = transition
        self._topic = base(transition.topic)
        self._layout = layout
        self._durability = durability
        self._ids = transition.message_ids
        self._results: list[T | None] = list(known) or [None] * len(self._ids)
        self._settled_before: set[int] = set()
        self._error: LisaError | None = None

    def run(self) -> Flow[list[T]]:
        """Go on until each message has its result. Raises LisaError."""
        patience = self._store.patience()
        todo = self._open()
        while True:
            misplaced = yield from self._round(todo)
            if self._error is not None:
                self._error.outcomes = self._results
                raise self._error
            before = self._layout
            if misplaced or (not self._transition.minds_layout and self._open()):
                self._layout = yield from self._store.layout(self._topic)
            if self._layout == before:
                if not misplaced:
                    return self._results  # type: ignore[return-value]  # none is None any more
                pause = patience.next_pause()
                if pause is None:
                    raise Misplaced(
                        f"the shards of topic {self._topic!r} are being changed, and no manager "
                        "has finished that in time: see that one runs"
                    )
                yield Pause(pause)
            # What failed may have arrived in a place that is an older one by now.
            self._transition = self._transition.with_known_ids()
            todo = misplaced or self._open()

    def _open(self) -> list[int]:
        """The messages that nobody did anything about."""
        is_nowhere = self._transition.is_nowhere
        return [i for i, result in enumerate(self._results) if result is None or is_nowhere(result)]

    def _round(self, todo: list[int]) -> Flow[list[int]]:
        """Ask the places of one layout; those that follow another one by now refuse."""
        layout, asked = self._layout, todo
        when, misplaced = self._transition.asks_older, list[int]()
        if when == "first":
            asked, misplaced = yield from self._ask_older_first(todo)
        misplaced += yield from self._ask(asked, layout.shards, str(layout.number))
        if when == "after":
            for count in layout.older:
                nowhere = set(self._open()) - set(misplaced)
                yield from self._ask([i for i in todo if i in nowhere], count, "")
        return sorted(misplaced)

    def _ask_older_first(self, todo: list[int]) -> Flow[tuple[list[int], list[int]]]:
        """What is known there counts; the unknown ones, and those that it is too early for."""
        misplaced: list[int] = []
        for count in self._layout.older:
            picks = self._by_place(todo, count)
            calls = [self._transition.first_of(place, some) for place, some in picks.items()]
            said = yield from self._run(calls, list(picks.values()), "")
            misplaced += [i for i, result in said if isinstance(result, Misplaced)]
            for i, result in said:
                if result is Elsewhere.SETTLED:
                    self._settled_before.add(i)
                elif result is not None and not isinstance(result, (Elsewhere, Misplaced)):
                    self._results[i] = result
            todo = [i for i in todo if self._results[i] is None and i not in misplaced]
        return todo, misplaced

    def _ask(self, todo: list[int], count: int, layout: str) -> Flow[list[int]]:
        """Have the places of one count do it; those of another layout are answered as misplaced."""
        picks = self._by_place(todo, count)
        calls = [self._transition.part(place, some) for place, some in picks.items()]
        said = yield from self._run(calls, list(picks.values()), layout)
        for i, result in said:
            if result is not None and not isinstance(result, Misplaced):
                revived = i in self._settled_before
                self._results[i] = self._transition.revived(result) if revived else result
        return [i for i, result in said if isinstance(result, Misplaced)]

    def _by_place(self, todo: Sequence[int], count: int) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for i in todo:
            found.setdefault(self._layout.place(self._topic, self._ids[i], count), []).append(i)
        return found

    def _run(
        self, calls: Sequence[Transition[list[R]]], picks: Sequence[list[int]], layout: str
    ) -> Flow[list[tuple[int, R | Misplaced | None]]]:
        """Run calls together; each message with its result, None where its place refused."""
        if not calls:
            return []
        replies: list[list[R] | LisaError] = []
        if len(calls) == 1 or self._durability:  # each is confirmed where it was written
            for call in calls:
                try:
                    replies.append((yield from self._store.run_at(call, layout, self._durability)))
                except LisaError as error:
                    replies.append(error)
        else:
            replies = yield from self._store.run_many(calls, layout)
        said: list[tuple[int, R | Misplaced | None]] = []
        for some, reply in zip(picks, replies, strict=True):
            if isinstance(reply, Misplaced):
                said += [(i, reply) for i in some]
            elif isinstance(reply, LisaError):
                self._error = self._error or reply
                said += [(i, None) for i in some]
            else:
                said += zip(some, reply, strict=True)
        return said
