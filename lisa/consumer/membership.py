"""A consumer's membership in the group for which it reads one topic or shard."""

from __future__ import annotations

import logging

from lisa.core.delivery.group_resolution import (
    ask_for_group,
    declared_again,
    has_traces,
    is_emptied,
    is_former_shard,
    join,
    was_never_sent_to,
)
from lisa.core.model.backoff import FIRST_S, Backoff
from lisa.core.model.sharding import Shard, topic_of
from lisa.core.store.store import SyncStore
from lisa.core.transitions.groups import Declare

log = logging.getLogger("lisa.consumer")


LOOK_AGAIN_S = 1.0
"""How often a paused topic, or a topic without a group, is checked."""


class Membership:
    """Changed by the reader, and by the heartbeat, which writes the presence record.

    shard: the shard that is read, used in server calls and logs.
    topic: the topic of the shard, as handlers and users see it.
    wanted: the requested group, or empty.
    name: the consumer's name in the group.
    group: the group that is read; empty until known.
    is_removed: the group was removed and not declared again yet.
    is_announced: the heartbeat has written the presence record.
    is_forgotten: the heartbeat found no presence record, so the server may have lost its data.
    """

    def __init__(self, store: SyncStore, shard: Shard, wanted: str, name: str) -> None:
        self._store = store
        self.shard = shard
        self.topic = topic_of(shard)
        self.wanted = wanted
        self.name = name
        self.group = ""
        self.is_removed = False
        self.is_announced = False
        self.is_forgotten = False
        self._has_asked = False
        self._waits = Backoff(longest_s=LOOK_AGAIN_S)

    def is_former_shard(self) -> bool:
        """Whether the topic has other shards by now. Raises LisaError."""
        return self._store.drive(is_former_shard(self._store, self.shard))

    def enter(self) -> float:
        """Join the group, or take the next step towards it. Raises LisaError.

        Returns 0 if the group can be read, and otherwise the seconds until the next call.
        """
        if self.is_removed:
            if self._was_lost():
                return self._start_over()
            self._rejoin()
            return LOOK_AGAIN_S if self.is_removed else 0
        if self.group:
            return 0
        if self.is_former_shard():  # the heartbeat will close the subscription
            return LOOK_AGAIN_S
        group = self._store.drive(join(self._store, self.shard, self.wanted))
        if group is None:
            if not self._has_asked:
                self._has_asked = True
                log.info("topic %s has no group yet; waiting for one", self.shard)
                self._store.drive(ask_for_group(self._store, self.shard, self.name))
            return self._waits.take()
        if self._store.drive(was_never_sent_to(self._store, self.shard)):
            log.info("topic %s: nothing was ever sent to it; is the name right?", self.shard)
        self.group, self._has_asked = group, False
        self._waits.reset()
        log.info("topic %s: reading for group %s as %s", self.shard, group, self.name)
        return 0

    def lose(self, error: BaseException) -> bool:
        """Take note that the group is missing; returns whether it was removed. Raises LisaError.

        Otherwise the server has lost its data, and the next `enter` joins again.
        """
        if self._was_lost():
            self._start_over()
            return False
        log.error(
            "topic %s: group %s was removed; waiting until it is declared again (%s)",
            self.shard,
            self.group,
            error,
        )
        self.is_removed = True
        return True

    def mend(self) -> bool:
        """Restore the group's stream; returns False if the group is gone. Raises LisaError."""
        if self.group not in self._store.drive(self._store.groups(self.shard)):
            return False
        self._store.call(Declare(self.shard, self.group, only_mend=True))
        return True

    def _was_lost(self) -> bool:
        """Whether the group was lost with the server's data, not removed.

        A former shard has lost it, too: managers have deleted all of its keys.
        """
        if self.is_former_shard():
            return True
        flow = is_emptied(self._store, self.shard, self.name, is_announced=self.is_announced)
        if not self.is_forgotten and not self._store.drive(flow):
            return False
        return not self._store.drive(has_traces(self._store, self.shard, self.group))

    def _start_over(self) -> float:
        """Leave the lost group, to join again."""
        if self.is_former_shard():
            log.info("topic %s: the shard was deleted; the topic has others", self.shard)
        else:
            log.warning("topic %s: the server was emptied; joining again", self.shard)
        self.group, self.is_forgotten, self.is_removed = "", False, False
        return FIRST_S

    def _rejoin(self) -> None:
        """Join a removed group if it was declared again; never declares it."""
        flow = declared_again(self._store, self.shard, self.group, self.wanted)
        group = self._store.drive(flow)
        if group:
            self.group, self.is_removed = group, False
            log.info("topic %s: group %s was declared again; reading it", self.shard, group)

    def record_written(self) -> None:
        """Record that the heartbeat has written the presence record."""
        self.is_announced = True

    def record_missing(self) -> None:
        """Record that the heartbeat found no presence record; it writes the record again."""
        self.is_forgotten = True

    def group_answered(self) -> None:
        """Record that a read found the group, so only the presence record had been deleted."""
        self.is_forgotten = False
