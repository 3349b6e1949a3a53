"""Reads of several topics in one command, with the acks and the clock in the same packet."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import NamedTuple

from lisa.consumer.blocking_reads import BlockingReads
from lisa.consumer.member import Member
from lisa.consumer.settler import ReadAcks, Settler
from lisa.core.delivery.opening import (
    PlainState,
    StreamRead,
    parse_state,
    state_commands,
    were_added_since,
)
from lisa.core.model.errors import LisaError
from lisa.core.model.stream import Entry, parse_reads, read_all_command, read_command
from lisa.core.redis import errors
from lisa.core.redis.address import Address
from lisa.core.redis.flow import Command
from lisa.core.store.replies import microseconds
from lisa.core.store.store import SyncStore

LONGEST = timedelta(seconds=1)
"""The longest read. A request to end it may be lost, and its topics would wait for its end."""

LOOK_AGAIN_S = 1.0
"""How often topics are checked for lost presence records, or for what lost replies delivered."""


class Found(NamedTuple):
    """What a read found of one topic."""

    topic: Member
    entries: Sequence[Entry]
    read: StreamRead


class SharedReads(BlockingReads):
    """A connection for reads of several topics, for one group and under one consumer name."""

    def __init__(
        self,
        store: SyncStore,
        address: Address,
        group: str,
        name: str,
        *,
        longest: timedelta,
        settler: Settler,
    ) -> None:
        self.block_ms = min(longest, LONGEST) // timedelta(milliseconds=1)
        super().__init__(store, address, LONGEST, f"topics of group {group}")
        self.group, self.name = group, name
        self._settler = settler
        self.share_acks = settler.share_acks
        self._topics: dict[bytes, Member] = {}
        self._acking: dict[Member, None] = {}
        self._lost: set[Member] = set()
        self._look_again = self._look_for_lost = 0.0
        self._command = lru_cache(maxsize=32)(self._new_command)

    def use(self, topics: Iterable[Member]) -> None:
        """Set the topics to read."""
        keys = self._store.keys
        self._topics = {
            keys.topic(one.sub.shard).group(self.group).ready.encode(): one for one in topics
        }
        self._command.cache_clear()

    def _new_command(self, count: int, block_ms: int) -> tuple[str | int, ...]:
        streams = [stream.decode() for stream in self._topics]
        return read_all_command(streams, self.group, self.name, count, block_ms)

    def missing(self, error: BaseException) -> Member | None:
        """The topic whose stream or group does not exist, if the error names it."""
        words = str(error).replace("'", " ").split()
        return next((one for name in words if (one := self._topics.get(name.encode()))), None)

    def translated(self, error: BaseException) -> LisaError:
        """Lisa's error for one of the client's."""
        return errors.translated(error, self._store.where)

    def will_ack(self, topic: Member) -> None:
        """Send the acks of a topic with the next reads."""
        self._acking[topic] = None

    def flush(self) -> None:
        """Let the settler send the acks now, because the next read may be far off."""
        for topic in self._acking:
            self._settler.flush_now_for(topic.sub)
        self._acking.clear()

    def read(self, count: int, *, blocks: bool, only: Member | None = None) -> list[Found]:
        """Read up to `count` entries of each topic, or of one. Raises client errors.

        Their topics' states are known as far as one more round trip tells them.
        """
        block_ms = self.block_ms if blocks else 0
        acks, block_ms = self._acks(block_ms)
        if only is None:
            command = self._command(count, block_ms)
        else:
            stream = self._store.keys.topic(only.sub.shard).group(self.group).ready
            command = read_command(stream, self.group, self.name, count, block_ms)
        forgotten = self._forgotten()
        asked_at = time.monotonic()
        clock, reply = self.exchange(acks, [("TIME",), command])
        read_at = time.monotonic()
        for member in forgotten:
            member.sub.membership.group_answered()
        at_us = None if isinstance(clock, Exception) else microseconds(clock)
        state = None if at_us is None else PlainState(at_us, None)
        read = StreamRead(asked_at, read_at, state)
        found = [Found(self._topics[one], entries, read) for one, entries in parse_reads(reply)]
        return self._with_states(found)

    def _forgotten(self) -> list[Member]:
        """The topics without a presence record, at most once a second; see `Membership`."""
        now = time.monotonic()
        if now < self._look_again:
            return []
        self._look_again = now + LOOK_AGAIN_S
        return [one for one in self._topics.values() if one.sub.membership.is_forgotten]

    def reply_lost(self) -> None:
        """Record that a reply was lost, which may have delivered entries of any topic."""
        self._lost = set(self._topics.values())
        for member in self._lost:
            member.stream.lost.record()

    def release_lost(self) -> None:
        """Release what lost replies may have delivered, each second. Raises LisaError."""
        now = time.monotonic()
        if self._lost and now >= self._look_for_lost:
            self._lost.intersection_update(self._topics.values())
            for one in self._with_lost():
                if not one.stream.lost.release():
                    self._lost.discard(one)
            self._look_for_lost = now + LOOK_AGAIN_S

    def _with_lost(self) -> list[Member]:
        """The topics to look at one by one: those with pending entries, or for the last time."""
        lost = list(self._lost)
        commands = [one.stream.lost.command() for one in lost]
        replies = self._store.drive(self._store.commands_once(commands)) if lost else ()
        return [
            one
            for one, pending in zip(lost, replies, strict=True)
            if pending or one.stream.lost.is_last_look  # an error counts as pending entries
        ]

    def _acks(self, block_ms: int) -> tuple[list[ReadAcks], int]:
        """The acks to send with a read, and how long it may block."""
        acks, now = [], time.monotonic()
        for topic in list(self._acking):
            outcomes = topic.sub.outcomes
            if block_ms and outcomes.acks and (wait_ms := topic.stream.acks_wait_ms(now)):
                block_ms = min(block_ms, wait_ms)
                continue
            del self._acking[topic]
            if outcomes and (some := self._settler.acks_for_read(topic.sub)):
                acks.append(some)
        return acks, block_ms

    def _with_states(self, found: list[Found]) -> list[Found]:
        """Ask for the states of topics whose entries were there before the read."""
        asked = [at for at, one in enumerate(found) if self._needs_state(one)]
        if not asked:
            return found
        commands: list[Command] = []
        for at in asked:
            keys = self._store.keys.topic(found[at].topic.sub.shard)
            commands += state_commands(keys, self.group)
        asked_at = time.monotonic()
        replies = self.connection.execute_many(commands)
        read_at = time.monotonic()
        each = len(replies) // len(asked)
        for place, at in enumerate(asked):
            state = parse_state(replies[place * each : (place + 1) * each])
            read = StreamRead(found[at].read.asked_at, read_at, state, state_asked_at=asked_at)
            found[at] = found[at]._replace(read=read)
        return found

    @staticmethod
    def _needs_state(found: Found) -> bool:
        """Whether to read the topic's state: entries may be older than the state that is known."""
        state = found.read.state
        is_known = state is not None and were_added_since(found.entries, state.at_us)
        return not is_known and all(one.envelope for one in found.entries)
