"""Finds the place of each message of a topic that is split over shards.

A place refuses new messages, and every call that names them by id, from those who know another
layout than itself. So who knows nothing of shards needs no question first, and an answer that says
"unknown" is known to come from the right place. Places of an older layout are asked as well: after
the present one, or, where an id must not be taken twice, before it. Each place remembers by itself
what was settled there, while the id may live in an older one: only what is live is the last word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from lisa.core.durability import Replicas
from lisa.core.errors import InvalidMessage, LisaError, Misplaced, TopicFull
from lisa.core.flow import Flow, Pause
from lisa.core.shards import PLAIN, Layout, base
from lisa.core.transitions.base import ById, Elsewhere, Transition
from lisa.core.transitions.inspect import Inspect

if TYPE_CHECKING:
    from lisa.core.patience import Patience
    from lisa.core.store import Store

__all__ = ["by_id"]

T = TypeVar("T")
R = TypeVar("R")

UNSPLIT = str(PLAIN.number)


def by_id(store: Store, transition: ById[T], durability: Replicas | None = None) -> Flow[list[T]]:
    """See `Store.run_by_id`."""
    topic, patience, results = transition.topic, store.patience(), list[T]()
    layout = store.known_layout(topic)
    if layout is None:
        try:
            results = yield from store.run_at(transition, UNSPLIT, patience, durability)
        except Misplaced:
            transition = transition.with_known_ids()
        else:
            if transition.minds_layout or not any(map(transition.is_nowhere, results)):
                return results
        layout = yield from store.layout(topic)
        if results and not layout.number:
            return results
    search = _Search(store, transition, layout, results, patience=patience, durability=durability)
    return (yield from search.run())


class _Search(Generic[T]):
    """One transition's messages, and what is known of each so far."""

    def __init__(
        self,
        store: Store,
        transition: ById[T],
        layout: Layout,
        known: Sequence[T],
        *,
        patience: Patience,
        durability: Replicas | None,
    ) -> None:
        self._store = store
        self._transition = transition
        self._topic = base(transition.topic)
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
        """Go on until each message has its result. Raises LisaError."""
        todo = self._open()
        while True:
            yield from self._round(todo)
            misplaced = sorted(self._misplaced)
            if self._error is not None and not (misplaced and _refuses(self._error)):
                self._error.outcomes = self._results
                raise self._error
            before = self._layout
            if misplaced or (not self._transition.minds_layout and self._open()):
                self._layout = yield from self._store.layout(self._topic)
            if self._layout == before:
                if not misplaced:
                    return self._results  # type: ignore[return-value]  # none is None any more
                pause = self._patience.next_pause()
                if pause is None:
                    error = Misplaced(
                        f"the shards of topic {self._topic!r} are being changed, and no manager "
                        "has finished that in time: see that one runs"
                    )
                    error.outcomes = self._results
                    raise error
                yield Pause(pause)
            # What failed may have arrived in a place that is an older one by now.
            self._transition = self._transition.with_known_ids()
            todo = misplaced or self._open()

    def _open(self) -> list[int]:
        """The messages that nobody did anything about."""
        is_nowhere = self._transition.is_nowhere
        return [i for i, result in enumerate(self._results) if result is None or is_nowhere(result)]

    def _round(self, todo: list[int]) -> Flow[None]:
        """Ask the places of one layout; those that follow another one by now refuse."""
        layout, when = self._layout, self._transition.asks_older
        self._misplaced, asked = set(), todo
        if when == "first":
            asked = yield from self._ask_older_first(todo)
        yield from self._ask(asked, layout.shards, str(layout.number))
        if when == "after":
            for count in layout.older:
                yield from self._ask_older(todo, count)

    def _answered(self, todo: Sequence[int]) -> list[int]:
        """Those of which no place refused to tell."""
        return [i for i in todo if i not in self._misplaced and i not in self._failed]

    def _ask_older_first(self, todo: list[int]) -> Flow[list[int]]:
        """What is known there counts; those that are not. Each place has to be closed by now."""
        closed = f"-{self._layout.number}"
        for count in self._layout.older:
            picks = self._by_place(todo, count)
            calls = [self._transition.first_of(place, some) for place, some in picks.items()]
            said = yield from self._run(calls, list(picks.values()), closed, self._durability)
            for i, result in said:
                if result is Elsewhere.SETTLED:
                    self._settled_before.add(i)
                elif not isinstance(result, Elsewhere):
                    self._results[i] = result
            todo = [i for i in self._answered(todo) if self._results[i] is None]
        return todo

    def _ask_older(self, todo: list[int], count: int) -> Flow[None]:
        """Go on where nothing was done yet, and where an id lives on that was settled elsewhere."""
        nowhere, asked = set(self._open()), self._answered(todo)
        settled = [i for i in asked if i not in nowhere and self._may_be_settled(i)]
        picks = self._by_place(settled, count)
        looks = [Inspect(place, [self._ids[i] for i in some], bodies=False)
                 for place, some in picks.items()]  # fmt: skip
        seen = yield from self._run(looks, list(picks.values()))
        live = {i for i, found in seen if found.envelope}
        yield from self._ask([i for i in asked if i in nowhere or i in live], count, "")

    def _may_be_settled(self, i: int) -> bool:
        result = self._results[i]
        return result is not None and self._transition.may_be_settled(result)

    def _ask(self, todo: list[int], count: int, layout: str) -> Flow[None]:
        """Have the places of one count do it."""
        transition, picks = self._transition, self._by_place(todo, count)
        calls = [transition.part(place, some) for place, some in picks.items()]
        said = yield from self._run(calls, list(picks.values()), layout, self._durability)
        for i, result in said:
            if self._results[i] is None or not transition.is_nowhere(result):
                revived = i in self._settled_before
                self._results[i] = transition.revived(result) if revived else result

    def _by_place(self, todo: Sequence[int], count: int) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for i in todo:
            found.setdefault(self._layout.place(self._topic, self._ids[i], count), []).append(i)
        return found

    def _run(
        self,
        calls: Sequence[Transition[list[R]]],
        picks: Sequence[list[int]],
        layout: str = "",
        durability: Replicas | None = None,
    ) -> Flow[list[tuple[int, R]]]:
        """Run calls together; each message with its result, but for those of places that refused.

        Of these nothing is known any more: what waits in such a place must not be taken elsewhere.
        """
        if not calls:
            return []
        said: list[tuple[int, R]] = []
        replies = yield from self._replies(calls, layout, durability)
        for some, reply in zip(picks, replies, strict=True):
            if isinstance(reply, Misplaced):
                self._misplaced.update(some)
            elif isinstance(reply, LisaError):
                # What one place refused says nothing of another that may have written.
                if self._error is None or (_refuses(self._error) and not _refuses(reply)):
                    self._error = reply
                self._failed.update(some)
                for i in some:
                    self._results[i] = None
            else:
                said += zip(some, reply, strict=True)
        return said

    def _replies(
        self, calls: Sequence[Transition[list[R]]], layout: str, durability: Replicas | None
    ) -> Flow[list[list[R] | LisaError]]:
        if len(calls) > 1 and durability is None:
            return (yield from self._store.run_many(calls, layout, self._patience))
        replies: list[list[R] | LisaError] = []
        for call in calls:  # each is confirmed where it was written
            try:
                reply = yield from self._store.run_at(call, layout, self._patience, durability)
                replies.append(reply)
            except LisaError as error:
                replies.append(error)
        return replies


def _refuses(error: LisaError) -> bool:
    """Whether a place that says so has surely written nothing of that call."""
    return isinstance(error, (InvalidMessage, TopicFull))
