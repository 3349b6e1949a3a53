"""Clears away what time has made useless.

That is: expired messages, names of dead consumers, old garbage, idle topics' names, groups whose
removal was cut short, and the records of managers that are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from lisa.core import presence, removal
from lisa.core.clock import duration_ms, human
from lisa.core.errors import GroupRemoved
from lisa.core.metrics.numbers import Tally
from lisa.core.presence import GONE_AFTER, ConsumerPresence
from lisa.core.store import SyncStore, chunks
from lisa.core.transitions.base import text
from lisa.core.transitions.expire import Expired
from lisa.core.transitions.forget import Forget
from lisa.core.transitions.purge import Purge
from lisa.manager.expirer import Expirer
from lisa.manager.lookout import ask_all

__all__ = ["Sweeper"]

PAGE = 200
MOST_PAGES = 100
"""One run takes no more pages of a kind; what is left waits for the next."""
MOST_CALLS = 500
"""One run settles what removed groups owe in no more calls than that."""

IDLE_AFTER_MS = 3_600_000
GONE_AFTER_MS = duration_ms(GONE_AFTER)

log = logging.getLogger(__name__)


class Sweeper:
    """`configured` says whether a topic stands in the configuration: it is never unregistered.

    `stopped` is asked during long work whether to leave it.
    """

    def __init__(
        self,
        store: SyncStore,
        expirer: Expirer,
        configured: Callable[[str], bool],
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.moved = Tally()
        self._store = store
        self._expirer = expirer
        self._configured = configured
        self._stopped = stopped

    def pick(self, topics: Sequence[str]) -> list[str]:
        """Those where a step may find something to do. Raises ServerUnavailable.

        Also learns what groups they have, whatever wake-ups were lost.
        """
        asked, sizes = list[tuple[str | int, ...]](), list[int]()
        for topic in topics:
            questions = self._questions(topic)
            asked += questions
            sizes.append(len(questions))
        replies = iter(ask_all(self._store, asked))
        long_ago = self._now_ms() - IDLE_AFTER_MS
        return [
            topic for topic, size in zip(topics, sizes, strict=True)
            if self._is_worth_it(topic, [next(replies) for _ in range(size)], long_ago)
        ]  # fmt: skip

    def _questions(self, topic: str) -> list[tuple[str | int, ...]]:
        keys = self._store.keys.topic(topic)
        names = self._store.known_groups(topic) or ()
        own = [keys.group(name) for name in names]
        return [
            ("EXISTS", keys.expiry, keys.consumers, *[group.garbage for group in own]),
            ("EXISTS", *self._places(topic, names)),
            ("ZSCORE", self._store.keys.topics, topic),
            ("HKEYS", keys.groups),
            ("HKEYS", keys.options),
            *[("XINFO", "CONSUMERS", group.ready, name)
              for group, name in zip(own, names, strict=True)],
        ]  # fmt: skip

    def _is_worth_it(self, topic: str, replies: Sequence[Any], long_ago: int) -> bool:
        if any(isinstance(reply, Exception) for reply in replies):
            return True
        aging, used, seen, declared, options, *consumers = replies
        groups = tuple(sorted(text(name) for name in declared))
        if groups != self._store.known_groups(topic):
            self._store.drive(self._store.groups(topic))
            return True
        idle = not used and seen is not None and float(seen) < long_ago
        is_left = idle and not self._configured(topic)
        return bool(aging or any(consumers) or removal.marked(options) or is_left)

    def step(self, topic: str) -> bool:
        """One bounded run over a topic; whether it was idle and is unregistered now."""
        now_ms = self._now_ms()
        self.expire(topic, now_ms)
        records = self._store.drive(presence.consumers(self._store, topic))
        alive = {one.name for one in records if one.seen_ms > now_ms - GONE_AFTER_MS}
        gone = [one for one in records if one.name not in alive]
        self._finish_removals(topic)
        groups = self._store.drive(self._store.groups(topic))
        for group in groups:
            try:
                self._forget(topic, group, alive, gone)
                self._purge(topic, group, now_ms)
            except GroupRemoved:
                continue
        for record in gone:
            if record.group not in groups:  # no group that could still owe it anything
                self._store.drive(presence.leave_consumer(self._store, topic, record.name))
        return not self._configured(topic) and self._unregister(topic, groups, now_ms)

    def expire(self, topic: str, now_ms: int) -> int:
        """End what is past its ttl, page by page past ids in flight; answers how many ended."""
        expiry, ended, passed = self._store.keys.topic(topic).expiry, 0, 0
        for _ in range(MOST_PAGES):
            found = self._store.ask("ZRANGEBYSCORE", expiry, "-inf", now_ms, "LIMIT", passed, PAGE)
            if not found:
                break
            outcomes = self._expirer.end(topic, [text(message_id) for message_id in found])
            # What still stands in the list is stepped over; what was ended has left it.
            passed += sum(one in (Expired.IN_FLIGHT, Expired.NOT_DUE) for one in outcomes)
            ended += outcomes.count(Expired.EXPIRED)
        if ended:
            log.info("topic %s: %d messages were past their ttl", topic, ended,
                     extra={"topic": topic})  # fmt: skip
        return ended

    def _finish_removals(self, topic: str) -> None:
        options = self._store.ask("HKEYS", self._store.keys.topic(topic).options)
        allowance = removal.Allowance(MOST_CALLS, self._stopped)
        for group in sorted(removal.marked(options)):
            flow = removal.finish(
                self._store, topic, group, removal.ABANDONED_MS, allowance=allowance
            )
            found = self._store.drive(flow)
            if found and (found.settled or found.is_done):
                done = "finished it" if found.is_done else "did a part, the next follows"
                log.warning("topic %s: the removal of group %s had been cut short; %s: %d messages "
                            "settled", topic, group, done, found.settled,
                            extra={"topic": topic, "group": group})  # fmt: skip

    def managers(self) -> None:
        """Take away the records of managers that are gone. Raises LisaError."""
        now_ms = self._now_ms()
        for record in self._store.drive(presence.managers(self._store)):
            if record.seen_ms <= now_ms - GONE_AFTER_MS:
                self._store.drive(presence.leave_manager(self._store, record.name))

    def _forget(
        self, topic: str, group: str, alive: set[str], gone: list[ConsumerPresence]
    ) -> None:
        ready = self._store.keys.topic(topic).group(group).ready
        known = self._store.ask("XINFO", "CONSUMERS", ready, group)
        names = {text(dict(zip(info[::2], info[1::2], strict=True))[b"name"]) for info in known}
        names |= {one.name for one in gone if one.group == group}
        for some in chunks(sorted(names - alive), PAGE):
            forgotten = self._store.call(Forget(topic, group, some, GONE_AFTER_MS))
            if forgotten:
                log.info("topic %s, group %s: forgot consumers %s", topic, group,
                         ", ".join(forgotten), extra={"topic": topic, "group": group})  # fmt: skip

    def _purge(self, topic: str, group: str, now_ms: int) -> None:
        keep_ms = duration_ms(self._store.drive(self._store.options(topic)).garbage_keep)
        garbage = self._store.keys.topic(topic).group(group).garbage
        before_ms, purged = now_ms - keep_ms, 0
        for _ in range(MOST_PAGES):
            found = self._store.ask("ZRANGEBYSCORE", garbage, "-inf", before_ms, "LIMIT", 0, PAGE)
            ids = [text(message_id) for message_id in found]
            count = 0
            for some in chunks(ids, self._store.batch_size(topic, Purge)):
                done = self._store.call(Purge(topic, group, some, before_ms))
                count += done.count(True)
            purged += count
            if count == 0:
                break
        if purged:
            self.moved.add(purged, "purged")
            log.warning("topic %s, group %s: purged %d messages of garbage older than %s",
                        topic, group, purged, human(keep_ms),
                        extra={"topic": topic, "group": group})  # fmt: skip

    def _unregister(self, topic: str, groups: tuple[str, ...], now_ms: int) -> bool:
        seen = self._store.ask("ZSCORE", self._store.keys.topics, topic)
        idle = seen is not None and float(seen) < now_ms - IDLE_AFTER_MS
        if not idle or self._is_used(topic, groups):
            return False
        self._store.ask("ZREM", self._store.keys.topics, topic)
        log.info("topic %s is idle and no longer listed", topic, extra={"topic": topic})
        return True

    def look_again(self, topic: str) -> bool:
        """Whether somebody sent while a topic was unregistered: then it is listed again.

        To be asked once nothing knows the topic any more. Raises LisaError.
        """
        used = self._is_used(topic, self._store.drive(self._store.groups(topic)))
        if used:
            self._store.drive(self._store.register([topic]))
        return used

    def _is_used(self, topic: str, groups: tuple[str, ...]) -> bool:
        return bool(self._store.ask("EXISTS", *self._places(topic, groups)))

    def _places(self, topic: str, groups: tuple[str, ...]) -> list[str]:
        """All that says that somebody still needs a topic."""
        keys = self._store.keys.topic(topic)
        places = [keys.waiting, keys.consumers, keys.events]
        for group in groups:
            own = keys.group(group)
            places += [own.entries, own.retry, own.garbage]
        return places

    def _now_ms(self) -> int:
        return self._store.drive(self._store.server_time_us()) // 1000
