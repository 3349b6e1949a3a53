"""The manager's services, run step by step at the instants of the test's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lisa.core.delivery.group_resolution import find_group
from lisa.core.model.clock import duration_ms
from lisa.core.model.errors import LisaError
from lisa.core.model.keys import DEFAULT_GROUP
from lisa.core.model.options import LARGEST_WINDOW, TopicOptions
from lisa.core.model.sharding import Shard, Topic, own_shard, topic_of, topics_of
from lisa.core.redis.flow import Command
from lisa.core.store.replies import pairs
from lisa.core.store.reshard import spread
from lisa.core.store.store import SyncStore
from lisa.core.transitions.groups import Declare
from lisa.manager.bulk_reads import head_command, head_ms
from lisa.manager.expirer import Expirer
from lisa.manager.promoter import Promoter
from lisa.manager.reclaimer import Reclaimer
from lisa.manager.scheduler import Scheduler
from lisa.manager.server_clock import ServerClock
from lisa.manager.signal_queue import SignalQueue
from lisa.manager.sweeper import Sweeper

MOST_HELD = 10_000
"""The most pending entries of a group whose leases are looked at."""


class VirtualClock(ServerClock):
    """The server's clock as the test sets it: known exactly, and never taken for a clock step."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        super().__init__()
        self._now = now_ms

    def sample(self, store: SyncStore) -> None:
        """Do nothing: the time is known."""

    def observe(self, now_ms: int, sent: float, received: float) -> None:
        """Do nothing: the time is known."""

    def instant(self, epoch_ms: float) -> float:
        """The `time.monotonic` instant of an epoch millisecond, if the clock ran from now on."""
        return time.monotonic() + (epoch_ms - self._now()) / 1e3

    def now_ms(self) -> int:
        """The test's time in epoch milliseconds."""
        return self._now()

    def latest_ms(self) -> int | None:
        """None: any time that the server shows is right."""
        return None


@dataclass(slots=True)
class DueWork:
    """What the server holds at one instant.

    promote, reclaim, expire, schedule: the shards where the service has work now.
    ready: topic and group, in order of name, with the number of messages for handlers.
    next_ms: the next instant at which a service has work, in epoch milliseconds; None if none.
    """

    now_ms: int
    promote: list[Shard] = field(default_factory=list)
    reclaim: list[Shard] = field(default_factory=list)
    expire: list[Shard] = field(default_factory=list)
    schedule: list[Shard] = field(default_factory=list)
    ready: dict[tuple[str, str], int] = field(default_factory=dict)
    next_ms: int | None = None

    def note(self, due: list[Shard], shard: Shard, instants: Iterable[int]) -> None:
        """Add a shard to one of the lists if an instant has come, and remember the next one."""
        later = []
        for at in instants:
            if at > self.now_ms:
                later.append(at)
            elif shard not in due:
                due.append(shard)
        if later and (self.next_ms is None or min(later) < self.next_ms):
            self.next_ms = min(later)


class ManagerSteps:
    """Promotes, reclaims and expires messages of the test's server, on request.

    Garbage is never purged, so a test can look at it after any time.
    """

    def __init__(self, store: SyncStore, now_ms: Callable[[], int]) -> None:
        self._store = store
        self._now_ms = now_ms
        clock = VirtualClock(now_ms)
        self._signals = SignalQueue(store)
        self._expirer = Expirer(store, self._signals)
        self._promoter = Promoter(store, clock, self._expirer, {})
        self._reclaimer = Reclaimer(store, clock, self._signals, LARGEST_WINDOW)
        self._scheduler = Scheduler(store, clock)
        self._sweeper = Sweeper(store, self._expirer, lambda _: True)

    def step(self, due: DueWork) -> bool:
        """Do the work that is due now; returns whether any message moved. Raises LisaError."""
        before = self._moved()
        outcomes = [*self._scheduler.step(due.schedule)]
        outcomes += self._promoter.step(due.promote) if due.promote else []
        if due.reclaim:
            self._reclaimer.scan_all()
            outcomes += self._reclaimer.step(due.reclaim)
        for outcome in outcomes:
            if isinstance(outcome, LisaError):
                raise outcome
        for shard in due.expire:
            self._sweeper.expire(shard, self._now_ms())
        self._signals.step()
        return bool(due.schedule) or self._moved() != before

    def _moved(self) -> list[object]:
        services = (self._promoter, self._reclaimer, self._expirer)
        return [service.moved.numbers() for service in services]

    def look(self, shards: Sequence[Shard], wanted: Collection[tuple[str, str | None]]) -> DueWork:
        """What is due, what is ready, and when to look again.

        Declares the groups that consumers join by name, and one on each topic without any. Raises
        LisaError, and ConfigError if a consumer without a group reads a topic with several groups.
        """
        groups = self.join(shards, wanted)
        if missing := self._missing(groups, wanted):
            self._declare(missing)
            groups = self._groups(shards)
        asked = {shard: self._questions(shard, names) for shard, names in groups.items()}
        commands = [question for questions in asked.values() for question in questions]
        replies = iter(self._store.drive(self._store.commands(commands)))
        due = DueWork(self._now_ms())
        for shard, names in groups.items():
            self._note(due, shard, names, replies)
        due.ready = dict(sorted(due.ready.items()))
        return due

    def join(
        self, shards: Sequence[Shard], wanted: Collection[tuple[str, str | None]]
    ) -> dict[Shard, tuple[str, ...]]:
        """Declare the groups that consumers join by name, as they do when they start.

        Returns all declared groups of each shard. Raises LisaError.
        """
        groups = self._groups(shards)
        missing = [
            (topic, group)
            for topic, group in wanted
            if group is not None and group not in groups[own_shard(Topic(topic))]
        ]
        if not missing:
            return groups
        self._declare(sorted(missing))
        return self._groups(shards)

    def _declare(self, missing: Iterable[tuple[str, str]]) -> None:
        for topic, group in missing:
            self._store.call(Declare(topic, group))
            self._store.drive(spread(self._store, Topic(topic)))

    def _groups(self, shards: Sequence[Shard]) -> dict[Shard, tuple[str, ...]]:
        """The groups declared on each shard, read in one round trip."""
        asked = [("HKEYS", self._store.keys.topic(shard).groups) for shard in shards]
        replies = self._store.drive(self._store.commands(asked))
        return {
            shard: self._store.learn_groups(shard, reply)
            for shard, reply in zip(shards, replies, strict=True)
        }

    def _missing(
        self,
        groups: Mapping[Shard, Sequence[str]],
        wanted: Collection[tuple[str, str | None]],
    ) -> list[tuple[str, str]]:
        """A group for each topic that has none."""
        missing = []
        for topic in topics_of(groups):
            declared = groups[own_shard(topic)]
            if not declared:
                missing.append((str(topic), DEFAULT_GROUP))
            if len(declared) > 1 and (topic, None) in wanted:
                self._store.drive(find_group(self._store, topic))
        return missing

    def _questions(self, shard: Shard, groups: Sequence[str]) -> list[Command]:
        """The commands whose replies `_note` reads, in its order."""
        keys, now_ms = self._store.keys.topic(shard), self._now_ms()
        own = [keys.group(name) for name in groups]
        commands: list[Command] = [("HGETALL", keys.options), *_around(keys.expiry, now_ms)]
        commands += _around(keys.ticks, now_ms)
        closed = [keys.lanes(name).closed for name in groups]
        for zset in (keys.waiting, *[keys_of_group.retry for keys_of_group in own], *closed):
            commands += _around(zset, now_ms)
        for name, group_keys in zip(groups, own, strict=True):
            commands += _around(group_keys.leases, now_ms)
            commands += [
                ("EXISTS", keys.lanes(name).turns),
                ("XLEN", group_keys.ready),
                ("XPENDING", group_keys.ready, name, "-", "+", MOST_HELD),
            ]
        return commands

    def _note(
        self, due: DueWork, shard: Shard, groups: Sequence[str], replies: Iterator[Any]
    ) -> None:
        """Add what the replies say of a shard. While its topic is paused, nothing is promoted."""
        stored = pairs(next(replies))
        options = TopicOptions.from_hash(stored)
        ack_ms = duration_ms(options.ack_timeout)
        due.note(due.expire, shard, _instants(replies))
        due.note(due.schedule, shard, _instants(replies))
        dues = [at for _ in range(1 + 2 * len(groups)) for at in _instants(replies)]
        if options.ramp is not None and b"ramped" in stored and dues:
            dues.append(options.ramp.next_ms(int(stored[b"ramped"])))
        due.note(due.promote, shard, [] if options.paused else dues)
        for name in groups:
            ends = [at + 1 for at in _instants(replies)]  # the reclaimer looks a millisecond later
            has_turns, length, held = next(replies), next(replies), next(replies)
            due.note(due.promote, shard, [due.now_ms] if has_turns and not options.paused else [])
            ends += [due.now_ms + ack_ms - int(entry[2]) for entry in held]
            due.note(due.reclaim, shard, ends)
            if length > len(held) and not options.paused:
                key = topic_of(shard), name
                due.ready[key] = due.ready.get(key, 0) + length - len(held)


def _around(zset: str, now_ms: int) -> list[Command]:
    """Commands for the first score, and for the first after now."""
    after = ("ZRANGEBYSCORE", zset, f"({now_ms}", "+inf", "WITHSCORES", "LIMIT", 0, 1)
    return [head_command(zset), after]


def _instants(replies: Iterator[Any]) -> list[int]:
    """The scores in the next two replies."""
    scores = [head_ms(next(replies)) for _ in range(2)]
    return [at for at in scores if at is not None]
