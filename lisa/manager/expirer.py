"""Ends messages that are past their ttl, and announces them."""

from __future__ import annotations

from collections.abc import Sequence

from lisa.core.metrics.numbers import Tally
from lisa.core.store import SyncStore, chunks
from lisa.core.transitions.expire import Expire, Expired
from lisa.core.transitions.inspect import Inspect
from lisa.manager.announcer import Announcer

__all__ = ["Expirer"]


class Expirer:
    """Used by the promoter, which meets them on its way, and by the sweeper, which seeks them."""

    def __init__(self, store: SyncStore, announcer: Announcer) -> None:
        self.moved = Tally()
        self._store = store
        self._announcer = announcer

    def end(self, topic: str, ids: Sequence[str]) -> list[Expired]:
        """End those that are past their ttl and not in flight; what became of each."""
        outcomes: list[Expired] = []
        listening = self._announcer.listens_to_expiry(topic)
        for some in chunks(ids, self._store.batch_size(topic, Inspect)):
            before = self._store.call(Inspect(topic, some)) if listening else []
            ended = [outcome for outcome, _ in self._store.call(Expire(topic, some))]
            for message_id, outcome, inspection in zip(some, ended, before, strict=False):
                if outcome is Expired.EXPIRED:
                    self._announcer.expired(topic, message_id, inspection)
            outcomes += ended
            self.moved.add(ended.count(Expired.EXPIRED), "expired")
        return outcomes
