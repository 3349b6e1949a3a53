"""A store for recording producers: keeps schedules in memory, without a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from lisa.core.model.options import TopicOptions
from lisa.core.model.recurring.definition import Record, occurrence_id
from lisa.core.model.sharding import PLAIN, Layout, Topic
from lisa.core.redis.flow import Flow
from lisa.core.store.store import AsyncStore, Store, SyncStore
from lisa.core.transitions.schedule import NewOccurrence, Schedule, ScheduleOutcome

Offer = Callable[[str, NewOccurrence], bool]
"""Records an occurrence of a topic; returns whether its id is new."""


class _InMemory(Store):
    """Serves the flows of schedules from memory. Its clock stands still, so no tick ever comes.

    Occurrences that wait for their ticks are not offered: the schedule itself says when it ticks.
    """

    offer: Offer
    _now_us: int = 0
    _records: dict[str, dict[str, bytes]]

    def begin(self, offer: Offer) -> None:
        """Start without schedules; `offer` takes the occurrences besides those of the ticks."""
        self.offer, self._now_us, self._records = offer, time.time_ns() // 1_000, {}

    def known_layout(self, _topic: Topic) -> Layout | None:
        return PLAIN

    def register(self, _topics: Iterable[str]) -> Flow[bool]:
        yield from ()
        return True

    def options(self, _topic: str) -> Flow[TopicOptions]:
        yield from ()
        return TopicOptions()

    def server_time_us(self, _key: str = "") -> Flow[int]:
        """The time of the start, a millisecond later at each call: ids by time stay distinct."""
        yield from ()
        self._now_us += 1_000
        return self._now_us

    def command(self, *command: str | bytes | float) -> Flow[Any]:
        yield from ()
        name, records = command[0], self._records.get(str(command[1]), {})
        if name == "HGET":
            return records.get(str(command[2]))
        if name == "HSCAN":
            return [b"0", [one for pair in records.items() for one in pair]]
        return None  # the list of topics with schedules, which managers read

    def run_at(self, call: Any, *_: Any) -> Flow[Any]:
        """Do what the script `schedule` does."""
        yield from ()
        assert isinstance(call, Schedule)  # noqa: S101  the flows of schedules run no other script
        records = self._records.setdefault(self.keys.topic(call.topic).schedules, {})
        stored = records.get(call.name)
        fence = Record.decode(stored).fence if stored else ""
        if fence != call.fence:
            return ScheduleOutcome("changed", fence, "")
        if not call.record:
            records.pop(call.name, None)
            return ScheduleOutcome("done", fence, "")
        records[call.name] = call.record
        return ScheduleOutcome("done", fence, "".join(self._create(call)))

    def _create(self, call: Schedule) -> Iterable[str]:
        record = Record.decode(call.record)
        for one in call.creates:
            is_pending = record.is_made and one.id == occurrence_id(call.name, record.tick or 0)
            yield "a" if is_pending or self.offer(call.topic, one) else "d"


class RecordedStore(_InMemory, SyncStore):
    """The store of a `RecordingProducer`."""


class AsyncRecordedStore(_InMemory, AsyncStore):
    """The store of an `AsyncRecordingProducer`."""
