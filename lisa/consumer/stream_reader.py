"""Reads one group's stream; other threads can interrupt a blocking read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from lisa.consumer.ack_sharing import AckSharing
from lisa.consumer.blocking_reads import LOST, BlockingReads
from lisa.consumer.inflight import Held
from lisa.consumer.lost_replies import LostReplies
from lisa.consumer.settler import Settler
from lisa.consumer.subscription import MOST, Subscription
from lisa.core.delivery.opening import StreamRead, parse_state, state_commands
from lisa.core.model.errors import LisaError
from lisa.core.model.stream import Entry, parse_read, read_command
from lisa.core.redis.address import Address
from lisa.core.redis.flow import Command

LONGEST_BLOCK = timedelta(hours=1)
LONGEST_CLUSTER_BLOCK = timedelta(seconds=1)

LOST_LOOK = timedelta(seconds=1)
"""Longest blocking time while the server may still execute an earlier, disconnected read."""


class StreamReader:
    """A separate connection for one subscription's reads, and the entries that it has read.

    lost: what lost replies may have delivered.
    longest: the longest blocking time.
    last_count: the number of entries that the last read returned.
    """

    def __init__(
        self, sub: Subscription, address: Address, poll: timedelta, settler: Settler
    ) -> None:
        is_cluster = address.kind == "cluster"
        self.longest = min(poll, LONGEST_CLUSTER_BLOCK if is_cluster else LONGEST_BLOCK)
        self._reads = BlockingReads(sub.store, address, self.longest, f"topic {sub.shard}")
        self._sub = sub
        self._settler = settler
        self.lost = LostReplies(sub)
        self._unopened: list[Entry] = []
        self.last_count = 0
        self._startable = 0
        self._asked_at = 0.0
        self._last_read = StreamRead(0.0, 0.0)
        self._asks_state = False
        self._ack_sharing = AckSharing()

    @property
    def is_reading(self) -> bool:
        """Whether a read is running."""
        return self._reads.is_reading

    @property
    def has_unopened(self) -> bool:
        """Whether entries were read but not opened."""
        return bool(self._unopened)

    def fetch(self, count: int, block: timedelta, startable: int) -> None:
        """Read up to `count` entries; none if interrupted. Raises LisaError and client errors.

        `startable` is the number of messages that handlers can start immediately.
        """
        self._startable = startable
        if self.lost.release():
            block = min(block, LOST_LOOK)
        self._unopened = self._read(max(1, min(count, MOST)), block)
        self.last_count = len(self._unopened)
        if self._unopened:
            self._ack_sharing.arrived(self._last_read.read_at)

    def open(self) -> list[Held]:
        """Open all read entries, in as many calls as needed. Raises LisaError.

        Once all readers hold `AHEAD_BYTES`, entries beyond the startable ones are released.
        """
        sub, taken, total, count = self._sub, list[Held](), 0, 0
        while self._unopened:
            if count >= self._startable and sub.pace.held.are_full():
                self.release_unopened()
                break
            try:
                some, opened = sub.open(self._unopened, self._last_read)
            except Exception:
                if not taken:
                    raise
                break  # dispatch the opened ones first; the next step retries
            size = sum(len(one.data) for one in some)
            sub.pace.held.add(size)
            taken += some
            total, count = total + size, count + opened
            del self._unopened[:opened]
        if count:
            sub.pace.size.measured(total, count)
        return taken

    def accept(self, entries: Sequence[Entry], read: StreamRead, startable: int) -> None:
        """Take entries that a shared read returned; `open` follows."""
        self._unopened, self._last_read, self._startable = [*entries], read, startable
        self.lost.received(entries)
        self._ack_sharing.arrived(read.read_at)

    @property
    def is_certain(self) -> bool:
        """Whether no lost reply can have delivered entries, and all delivered ones are opened."""
        return not self.lost.is_possible and not self._unopened

    def acks_wait_ms(self, now: float) -> int:
        """How many milliseconds to read without sending the acks; 0 to send them."""
        wait_ms = self._ack_sharing.wait_ms(len(self._sub.outcomes.acks), now)
        if wait_ms:
            self._settler.share_acks(self._sub)
        return wait_ms

    def drop_unopened(self) -> None:
        """Drop the unopened entries after their group was removed."""
        self._unopened.clear()

    def release_unopened(self) -> None:
        """Release the unopened entries."""
        if self._unopened:
            self._sub.releases.make([(entry.id, entry.entry) for entry in self._unopened])
            self._unopened.clear()

    def _read(self, count: int, block: timedelta) -> list[Entry]:
        sub = self._sub
        stream = sub.store.keys.topic(sub.shard).group(sub.group).ready
        block_ms = block // timedelta(milliseconds=1)
        acks_wait_ms = 0
        if block_ms and sub.outcomes.acks:
            acks_wait_ms = self.acks_wait_ms(time.monotonic())
            block_ms = min(block_ms, acks_wait_ms or block_ms)
        command = read_command(stream, sub.group, sub.name, count, block_ms)
        was_forgotten = sub.membership.is_forgotten
        self._reads.begin()
        try:
            if sub.is_interrupted():
                return []
            reply = self._ask(command, sends_acks=not acks_wait_ms)
        except LOST:
            self.lost.record()
            raise
        finally:
            self._reads.end()
        if was_forgotten:
            sub.membership.group_answered()
        entries = parse_read(reply)
        if entries:
            self.lost.received(entries)
            self._asks_state = bool(entries[-1].envelope) and not sub.store.has_nodes
        return entries

    def _ask(self, command: Command, *, sends_acks: bool) -> Any:
        """Send a read and return its reply.

        A few acks go in the same pipeline, as do the commands that ask for the topic's state if the
        last entry carried its envelope.
        """
        acks = self._settler.acks_for_read(self._sub) if sends_acks else None
        self._asked_at, state = time.monotonic(), None
        try:
            if acks is None and not self._asks_state:
                return self._reads.connection.execute(command)
            asks: Sequence[Command] = ()
            if self._asks_state:
                asks = state_commands(self._sub.store.keys.topic(self._sub.shard), self._sub.group)
            *told, reply = self._reads.exchange([acks] if acks else [], [*asks, command])
            state = parse_state(told) if told else None
            return reply
        finally:
            self._last_read = StreamRead(self._asked_at, time.monotonic(), state, acks is None)

    def interrupt(self) -> bool:
        """End a running read; see `BlockingReads`."""
        return self._reads.interrupt()

    def disconnect(self) -> None:
        """Close the connection until the next read."""
        self._reads.close()

    def close(self) -> None:
        """Release entries whose reply was lost, and close the connection."""
        with suppress(LisaError):  # the messages are redelivered when their leases expire
            self.lost.release()
        self._reads.close()
