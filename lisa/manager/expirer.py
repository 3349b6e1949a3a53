"""End messages past their ttl or too late for their late policy, and fire their signals."""

from __future__ import annotations

from collections.abc import Sequence

from lisa.core.metrics.numbers import Tally
from lisa.core.model.errors import LisaError
from lisa.core.store.store import SyncStore, chunks
from lisa.core.transitions.expire import Expire, Expired
from lisa.core.transitions.inspect import Inspect, Inspection
from lisa.manager.collapse import newer_occurrences
from lisa.manager.signal_queue import SignalQueue

_MOVED = (Expired.EXPIRED, Expired.SKIPPED, Expired.GARBAGE)


class Expirer:
    """Ends messages for the promoter, which comes across them, and the sweeper."""

    def __init__(self, store: SyncStore, signals: SignalQueue) -> None:
        self.moved = Tally()
        self._store = store
        self._signals = signals
        self._unanswered: dict[str, list[tuple[Expire, list[Inspection]]]] = {}

    def has_unanswered(self, topic: str) -> bool:
        """Whether a call got no reply. It may have ended messages, so `end` repeats it."""
        return bool(self._unanswered.get(topic))

    def forget(self, topic: str) -> None:
        """Drop the state of a removed topic."""
        self._unanswered.pop(topic, None)

    def end(self, topic: str, ids: Sequence[str]) -> list[Expired]:
        """End the messages that are past their ttl or too late, and not in flight.

        ids: as `exact_text` decodes them. Drops those that are not UTF-8: another program wrote
            them, and no message has them.

        Returns the outcomes in no particular order. Raises LisaError.
        """
        self._repeat(topic)
        ids, foreign = _split(ids)
        outcomes = [Expired.ORPHAN] * len(foreign)
        if foreign:
            keys = self._store.keys.topic(topic)
            for zset in (keys.waiting, keys.expiry):
                self._store.ask("ZREM", zset, *foreign)
        listening = self._signals.listens_to_ends(topic)
        for some in chunks(ids, self._store.batch_size(topic, Inspect)):
            before = self._store.call(Inspect(topic, some)) if listening else []
            newer = newer_occurrences(self._store, topic, some)
            outcomes += self._run(Expire(topic, some, newer), before)
        return outcomes

    def _repeat(self, topic: str) -> None:
        owed = self._unanswered.pop(topic, [])
        while owed:
            try:
                self._run(*owed.pop())
            except LisaError:
                self._unanswered[topic] += owed
                raise

    def _run(self, call: Expire, before: list[Inspection]) -> list[Expired]:
        try:
            ended = self._store.call(call)
        except LisaError:
            self._unanswered.setdefault(call.topic, []).append((call, before))
            raise
        for message_id, outcome, inspection in zip(call.ids, ended, before, strict=False):
            if outcome in _MOVED:
                self._signals.ended(call.topic, message_id, inspection, outcome)
        for kind in _MOVED:
            self.moved.add(ended.count(kind), kind.value)
        return ended


def _split(ids: Sequence[str]) -> tuple[list[str], list[bytes]]:
    """Ids of messages, and members of other programs that are not UTF-8."""
    own: list[str] = []
    foreign: list[bytes] = []
    for one in ids:
        try:
            one.encode()
        except UnicodeEncodeError:
            foreign.append(one.encode("utf-8", "surrogateescape"))
        else:
            own.append(one)
    return own, foreign
