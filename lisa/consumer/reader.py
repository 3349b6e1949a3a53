"""Read topics, up to 50 with one call, and pass their messages to the runner."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

from lisa.consumer.handlers import HandlerPlan, Handlers
from lisa.consumer.heartbeat import OutageLog
from lisa.consumer.inflight import Held
from lisa.consumer.membership import LOOK_AGAIN_S
from lisa.consumer.options import ConsumerOptions, WantedTopic
from lisa.consumer.read_topic import ReadTopic
from lisa.consumer.runner import Runner
from lisa.consumer.subscription import MOST, ShutdownCalls, Subscription, give_back
from lisa.core.daemon.threads import (
    KeyedPool,
    ServiceThread,
    longest_round_s,
    unforeseen,
)
from lisa.core.delivery.opening import PlainState, state_commands, state_of
from lisa.core.model.backoff import FIRST_S, Backoff, longest_after
from lisa.core.model.errors import ConfigError, GroupRemoved, LisaError, ServerUnavailable
from lisa.core.model.options import HANDLER_SUFFIX
from lisa.core.model.sharding import PLAIN, Shard, Topic, topic_of
from lisa.core.model.stream import Entry, parse_reads, read_all_command
from lisa.core.redis import errors
from lisa.core.redis.connection import Connection, reporting_client_id
from lisa.core.redis.flow import Command
from lisa.core.store.presence import handler_name
from lisa.core.store.store import SyncStore, chunks

log = logging.getLogger("lisa.consumer")

MOST_TOPICS = 50
"""Topics of one reader. Each message costs the server a read of them all."""

LONGEST_BLOCK = timedelta(hours=1)
LONGEST_SHARED_BLOCK = timedelta(seconds=1)
"""The longest read of several topics: a request to end it may be lost, and the others would wait.

Also of a read on a cluster, where no such request is made, and while the server may still execute
an earlier read, whose reply was lost.
"""

CHANGES_S = 0.1
"""How often a reader checks whether its topics should be read by others."""

NEXT_LOOK_S = 0.005
"""How soon a topic that holds as many messages as allowed is checked again."""

INTERRUPTS = 20
"""Attempts to end a read, 1 ms apart: one that arrives just before the read has no effect."""


class Reader:
    """A thread that reads topics for one group, under one consumer name, on one connection.

    It joins their groups, and reads as many messages as handlers finish soon, or, if handlers are
    slow, only once one is free. What is read is opened and submitted to the runner; if only one
    handler may run at a time, it runs on this thread.

    readings: the topics that are read; changed only by the reader's thread.
    is_alone: whether the reader has one topic at most.
    is_handling: whether the thread runs handlers.
    error: why no topic can be read at all.
    """

    def __init__(self, readers: Readers, number: int, name: str, *, is_alone: bool) -> None:
        self._readers = readers
        self._store, self._runner = readers.store, readers.runner
        self._handlers = readers.handlers
        self.name, self.is_alone = name, is_alone
        self.group = ""
        self.readings: list[ReadTopic] = []
        self.joining: deque[ReadTopic] = deque()
        self._recent: list[ReadTopic] = []
        self.is_handling = False
        self.is_busy = False
        self.error: LisaError | None = None
        self._backoff = Backoff()
        self._woken = threading.Event()
        self._is_reading = False
        self._look_at = 0.0
        self._rounds = 0
        self._client_id: int | None = None
        self._asked_at = 0.0
        options = readers.options
        self._is_cluster = options.address.kind == "cluster"
        most = LONGEST_SHARED_BLOCK if self._is_cluster else LONGEST_BLOCK
        self._block_s = min(options.poll_timeout, most).total_seconds()
        blocking = options.address.blocking_for(self._block_s)
        if not self._is_cluster:
            # CLIENT UNBLOCK must go to the right node; on a cluster, short reads are used instead.
            blocking = reporting_client_id(blocking, self._connected)
        self._connection = Connection(blocking)
        longest_s = readers.longest_s + self._block_s
        self.thread = ServiceThread(f"lisa-reader-{number}", self._run, longest_s)

    def _connected(self, client_id: int | None) -> None:
        self._client_id = client_id

    @property
    def has_room(self) -> bool:
        """Whether the reader can take another topic."""
        most = 1 if self.is_alone else MOST_TOPICS
        return len(self.readings) + len(self.joining) < most

    def wake(self) -> None:
        """End the reader's pauses and its wait for a free handler."""
        self._woken.set()
        self._runner.wake()

    def interrupt(self) -> bool:
        """Also end a running read, without losing entries, for changes that were made.

        Returns False if the server does not answer.
        """
        self.wake()
        rounds = self._rounds
        for _ in range(INTERRUPTS):
            client_id = self._client_id
            if not self._is_reading or self._rounds != rounds or client_id is None:
                break
            try:
                self._store.ask("CLIENT", "UNBLOCK", client_id)
            except LisaError as error:
                log.debug("%s: cannot interrupt the read: %s", self.thread.name, error)
                return False
            time.sleep(0.001)
        return True

    def _run(self) -> None:
        while self._take_changes():
            self.thread.begin()
            try:
                self._round()
            except LisaError as error:
                self._wait_out(error)
            except Exception as error:  # noqa: BLE001  logged; the reader must survive any error
                unforeseen("reading", error)
                for reading in self.readings:
                    reading.lost.record()
                self._pause(self._backoff.take())
            self._rounds += 1
        self._connection.close()

    def _take_changes(self) -> bool:
        """Take in topics, and leave closed ones and those of another reader.

        Returns False once no topic is left. Without a request, only looks every `CHANGES_S`.
        """
        if not self._has_changes() and time.monotonic() < self._look_at:
            return True
        self._look_at = time.monotonic() + CHANGES_S
        self._woken.clear()
        with suppress(IndexError):
            while True:
                reading = self.joining.popleft()
                self._use_plan(reading.sub)
                self.readings.append(reading)
        for reading in list(self.readings):
            sub = reading.sub
            if sub.closing.is_set():
                self._leave(reading)
            elif not self._fits(reading) and self._readers.move(reading, self):
                self._drop(reading)
        return bool(self.readings) or not self._readers.end(self)

    def _fits(self, reading: ReadTopic) -> bool:
        """Whether the topic belongs to this reader, and to its group."""
        sub = reading.sub
        if self.is_alone is not self._readers.must_be_alone(sub):
            return False
        others = [other.sub.group for other in self.readings if other is not reading]
        if sub.group and not any(others):
            self.group = sub.group
        return not sub.group or sub.group == self.group

    def _drop(self, reading: ReadTopic) -> None:
        self.readings.remove(reading)
        self._recent = [other for other in self._recent if other is not reading]

    def _leave(self, reading: ReadTopic) -> None:
        """Release what no handler of a closed topic has started."""
        sub = reading.sub
        try:
            sub.release_unopened()
            if sub.batch:
                sub.give_back(sub.batch.take())
            with suppress(LisaError):  # the messages are redelivered when their leases expire
                reading.lost.release(now=True)
        finally:
            self._drop(reading)
            reading.ended.set()

    def _pause(self, seconds: float) -> None:
        """Wait until `wake`, at most for `seconds`."""
        self.thread.rest()
        if not self.joining:
            self._woken.wait(seconds)
        self.thread.begin()

    def _has_changes(self) -> bool:
        return self._woken.is_set() or bool(self.joining)

    def _round(self) -> None:
        """Handle what waits for this thread, then read once. Raises LisaError."""
        self._run_here()
        for reading in self.readings:
            if (batch := reading.sub.batch) and batch.left_s() == 0:
                self._submit(reading.sub)
        now = time.monotonic()
        readable = [
            reading
            for reading in self.readings
            if now >= reading.rests_until
            and (
                (reading.is_steady and reading.sub.group == self.group)
                or self._is_readable(reading)
            )
        ]
        for reading in [waiting for waiting in readable if waiting.sub.unopened]:
            self._hand_over(reading, startable=1)
            readable.remove(reading)
        if self._has_changes():
            return
        if not readable:
            self.is_busy = False
            if not self._runner.has_work_here:
                self._pause(self._next_look_s(LOOK_AGAIN_S))
            return
        ahead = self._ahead(readable)
        if ahead <= 0 and (not self._wait_free(readable[0]) or self._runner.has_work_here):
            return
        allowed = {reading: most for reading in readable if (most := self._allowed(reading)) > 0}
        if not allowed:
            self._pause(NEXT_LOOK_S)
            return
        self._read(allowed, ahead, is_complete=len(allowed) == len(readable))

    def _run_here(self) -> None:
        if not self._runner.has_work_here:
            return
        self.is_handling = True
        self.thread.rest()
        try:
            self._runner.run_here()
        finally:
            self.thread.begin()
            self.is_handling = False

    def _wait_free(self, reading: ReadTopic) -> bool:
        limit = reading.sub.limit if self.is_alone else self._runner.limit
        self.thread.rest()
        is_free = self._runner.wait_free(limit, self._has_changes)
        self.thread.begin()
        return is_free

    def _next_look_s(self, most_s: float) -> float:
        """Seconds until a resting topic can be tried again, or an incomplete batch is due."""
        now, found = time.monotonic(), most_s
        for reading in self.readings:
            if reading.rests_until > now:
                found = min(found, reading.rests_until - now)
            if reading.sub.batch and (left_s := reading.sub.batch.left_s()) is not None:
                found = min(found, left_s)
        return found

    def _is_readable(self, reading: ReadTopic) -> bool:
        sub = reading.sub
        if sub.is_interrupted():
            self._stop_reading(reading)
            return False
        try:
            is_ready = reading.prepare()
            if is_ready and not self._fits(reading):
                is_ready, self._look_at = False, 0.0
            if is_ready:
                reading.lost.release()
        except GroupRemoved as error:
            self._group_is_missing(reading, error)
        except ConfigError as error:
            if not sub.group:
                self._readers.failed(error)
                sub.close()
            else:
                self._fail(reading, error)
        except Exception as error:  # noqa: BLE001  logged; the other topics are read
            self._fail(reading, error)
        else:
            if not is_ready and sub.is_paused_topic:
                self._stop_reading(reading)
            return is_ready
        return False

    def _stop_reading(self, reading: ReadTopic) -> None:
        """Release unopened entries and the deliveries of an incomplete batch."""
        sub = reading.sub
        sub.release_unopened()
        if sub.batch:
            sub.give_back(sub.batch.take())

    def _allowed(self, reading: ReadTopic) -> int:
        """How many messages of a topic may be read now, whatever the others have."""
        sub, most = reading.sub, self._readers.options.poll_batch_size or MOST
        if sub.stats.degradation.is_degraded:
            return 1
        if sub.batch is None:
            return most - len(sub.unstarted)
        # While a batch waits for a handler, no other one is begun, except ahead of fast handlers.
        return max(most, sub.batch.size) - len(sub.unstarted) * sub.batch.size

    def _ahead(self, readable: Sequence[ReadTopic]) -> int:
        """How many messages to read besides those for free handlers, or at most 0 for none.

        This reader's share of what handlers finish soon, less what waits for a handler already.
        """
        recent = [reading for reading in self._recent if reading in readable] or readable
        size = recent[0].sub.limit.size if self.is_alone else self._runner.limit.size
        soon = min(reading.sub.pace.ahead(size) for reading in recent)
        soon //= self._readers.busy_count(self)
        if (batch := recent[0].sub.batch) is not None:
            waiting = len(recent[0].sub.unstarted) * batch.size
            return max(batch.size - len(batch), soon - waiting)
        return soon - sum(len(reading.sub.unstarted) for reading in self.readings)

    def _read(self, allowed: Mapping[ReadTopic, int], ahead: int, *, is_complete: bool) -> None:
        """Read messages for the free handlers, and `ahead` more. Raises LisaError.

        allowed: the topics, and how many messages of each.
        is_complete: whether no topic had to be left out for a moment.
        """
        readings = list(allowed)
        first = readings[0].sub
        free = min(self._runner.limit.free, first.limit.free) if first.batch is None else 0
        # XREADGROUP returns up to COUNT entries of each stream. Usually the streams that had some
        # last time have some again, and the others have few.
        among = 1 if len(readings) == 1 else max(1, len(self._recent))
        count = (ahead + free) // among
        if ahead <= 0:
            count = 1 if self._readers.has_several else free
        count = max(1, min(count, *allowed.values(), MOST))
        found, state = self._ask(
            readings, count, self._block_for(readings, is_complete=is_complete)
        )
        by_stream = {reading.stream.encode(): reading for reading in readings}
        received = [(by_stream[stream], entries) for stream, entries in found if entries]
        self.is_busy = bool(received)
        if received:
            self._recent = [reading for reading, _ in received]
        for reading, entries in received:
            reading.received(entries, self._asked_at, state)
        startable = max(1, free) if first.batch is None else first.batch.size
        for reading, _ in received:
            startable = max(0, startable - self._hand_over(reading, startable=startable))

    def _block_for(self, readings: Sequence[ReadTopic], *, is_complete: bool) -> float:
        if self._runner.has_work_here:
            return 0.0
        most_s = self._block_s if is_complete else NEXT_LOOK_S
        if len(self.readings) > 1 or readings[0].lost.are_possible:
            most_s = min(most_s, LONGEST_SHARED_BLOCK.total_seconds())
        if readings[0].asks_state:  # what it returns later than that needs the script to be opened
            most_s = min(most_s, readings[0].sub.leases.ack_timeout_s / 4)
        return self._next_look_s(most_s)

    def _ask(
        self, readings: Sequence[ReadTopic], count: int, block_s: float
    ) -> tuple[list[tuple[bytes, list[Entry]]], PlainState | None]:
        """Send a read. Raises LisaError.

        If entries of its only topic carry envelopes, the topic's state is asked for after the read,
        in the same packet: the server answers that as soon as the read has got an entry.
        """
        streams = [reading.stream for reading in readings]
        block_ms = math.ceil(1_000 * block_s)
        read = read_all_command(streams, self.group, self.name, count, block_ms)
        forgotten = [reading for reading in readings if reading.sub.membership.is_forgotten]
        asks: Sequence[Command] = ()
        if len(readings) == 1 and readings[0].asks_state:
            sub = readings[0].sub
            asks = state_commands(self._store.keys.topic(sub.shard), self.group)
        self._is_reading = bool(block_ms)
        try:
            if self._has_changes():
                return [], None
            self._asked_at = time.monotonic()
            found, *state = self._connection.execute_chain(streams[0], [read, *asks])
            if isinstance(found, Exception):
                raise found
        except errors.LOST as error:
            for reading in readings:
                reading.lost.record()
            raise errors.translated(error, self._store.where) from error
        except errors.ClientError as error:
            known = errors.translated(error, self._store.where)
            if isinstance(known, ServerUnavailable):
                raise known from error
            self._find_failing(readings, error)
            return [], None
        finally:
            self._is_reading = False
        for reading in forgotten:
            reading.sub.membership.group_answered()
        self._succeeded(readings)
        return parse_reads(found), state_of(state) if asks else None

    def _find_failing(self, readings: Sequence[ReadTopic], error: BaseException) -> None:
        """Handle a refused read: read the topics one by one, to find which one was refused."""
        if len(readings) == 1:
            self._refused(readings[0], error)
            return
        if "CROSSSLOT" in str(error):
            self._readers.refuse_sharing()
            self._look_at = 0.0
            return
        for reading in readings:
            read = read_all_command([reading.stream], self.group, self.name, 1, 0)
            try:
                self._asked_at = time.monotonic()
                found = parse_reads(self._connection.execute(read))
            except errors.LOST as lost:
                reading.lost.record()
                raise errors.translated(lost, self._store.where) from lost
            except errors.ClientError as another:
                self._refused(reading, another)
                continue
            if found:
                reading.received(found[0][1], self._asked_at)
                self._hand_over(reading, startable=1)

    def _refused(self, reading: ReadTopic, error: BaseException) -> None:
        """Restore a group's stream, or wait until the group is declared again."""
        sub = reading.sub
        try:
            is_about_group = errors.is_missing_group(error) or str(error).startswith("UNBLOCKED")
            if not is_about_group:
                self._fail(reading, errors.translated(error, self._store.where))
            elif not sub.membership.mend():
                self._group_is_missing(reading, error)
        except Exception as another:  # noqa: BLE001  logged; tried again
            self._fail(reading, another)

    def _group_is_missing(self, reading: ReadTopic, error: BaseException) -> None:
        sub = reading.sub
        try:
            is_removed = sub.membership.lose(error)
        except LisaError as another:
            self._fail(reading, another)
            return
        sub.unopened.clear()
        if is_removed:
            sub.drop_all()
        reading.rest(LOOK_AGAIN_S if is_removed else FIRST_S)

    def _hand_over(self, reading: ReadTopic, *, startable: int) -> int:
        """Open the read entries and submit them; returns how many. Keeps the rest on errors."""
        sub, state = reading.sub, reading.take_state()
        if sub.is_interrupted():
            return 0  # a request to end the read that arrives just before it has no effect
        try:
            deliveries = sub.open(reading.asked_at, startable, state)
        except GroupRemoved as error:
            self._group_is_missing(reading, error)
            return 0
        except Exception as error:  # noqa: BLE001  logged; the other topics are read
            self._fail(reading, error)
            return 0
        if deliveries:
            self._submit(sub, deliveries)
        return len(deliveries)

    def _submit(self, sub: Subscription, deliveries: Sequence[Held] = ()) -> None:
        plan = self._use_plan(sub)
        if sub.enqueue(deliveries):
            self._runner.submit(sub, plan)

    def _use_plan(self, sub: Subscription) -> HandlerPlan:
        """The current handlers of a topic; prepares the subscription for them."""
        plan = self._handlers.plan(sub.topic, sub.wanted)
        sub.leases.use_handler_timeout(plan.timeout_s)
        batch = plan.batch
        sub.collect(*(None, 0.0) if batch is None else (batch.batch, batch.within_s))
        return plan

    def _fail(self, reading: ReadTopic, error: BaseException) -> None:
        topic = f"topic {reading.sub.shard}"
        if not isinstance(error, LisaError):
            unforeseen(f"{topic}: reading", error)
        elif reading.error is None:
            self._readers.outages.warn(f"{topic}: cannot read, trying again", error)
        reading.fail(error)

    def _wait_out(self, error: LisaError) -> None:
        """Wait for the server, which none of the topics can be read from."""
        if self.error is None:
            self._readers.outages.warn(f"{self._what}: cannot read, trying again", error)
        self.error = self.error or error
        self._pause(self._backoff.take(longest_after(error)))

    def _succeeded(self, readings: Sequence[ReadTopic]) -> None:
        if self.error is not None:
            self._readers.outages.end(f"{self._what}: reading again", self.error)
            self.error = None
            self._backoff.reset()
        for reading in readings:
            if reading.error is not None and (error := reading.succeed()):
                self._readers.outages.end(f"topic {reading.sub.shard}: reading again", error)

    @property
    def _what(self) -> str:
        if len(self.readings) == 1:
            return f"topic {self.readings[0].sub.shard}"
        return f"{len(self.readings)} topics"


class Readers:
    """The readers of a consumer: for each group and name, readers of up to `MOST_TOPICS` topics.

    A topic has a reader of its own if its handler takes batches or has a limit of its own, while it
    is degraded, and always on a cluster, where a node may hang. Topics are added and removed at any
    time, and their shards may change.

    runner, handlers, options: what readers use.
    new_subscription: makes the subscription of a shard for a group (or ""), under a consumer name.
    failed: called with an error that stops the consumer.
    outages: logs what fails; one for all readers.
    """

    def __init__(
        self,
        store: SyncStore,
        options: ConsumerOptions,
        handlers: Handlers,
        runner: Runner,
        *,
        new_subscription: Callable[[Shard, str, str], Subscription],
        failed: Callable[[LisaError], None],
        outages: OutageLog,
    ) -> None:
        self.store, self.options, self.handlers = store, options, handlers
        self.runner = runner
        self.failed, self.outages = failed, outages
        self._new_subscription = new_subscription
        self._name = handler_name(options.name)
        self._wanted: dict[tuple[Topic, str], WantedTopic] = {}
        self._shards: dict[tuple[Topic, str], set[Shard]] = {}
        self._readings: dict[Subscription, ReadTopic] = {}
        self._by_topic: dict[str, list[Subscription]] = {}
        self._readers: dict[Reader, None] = {}
        self._of: dict[ReadTopic, Reader] = {}
        self._made = 0
        self._is_sharing_refused = False
        self.longest_s = longest_round_s(store.connection.address.socket_timeout_s)
        self._pool: KeyedPool[WantedTopic] = KeyedPool("lisa-follow", longest_s=self.longest_s)
        self._lock = threading.RLock()
        self.is_open = False

    @property
    def has_several(self) -> bool:
        """Whether the topics share the handlers."""
        return len(self._readings) > 1

    def busy_count(self, reader: Reader) -> int:
        """How many readers share what handlers finish soon: those that found messages, and this."""
        return sum(other.is_busy or other is reader for other in list(self._readers))

    def subscriptions(self) -> list[Subscription]:
        """The subscriptions to all topics."""
        return list(self._readings)

    def states(self) -> list[tuple[Subscription, bool]]:
        """All subscriptions, with whether they cannot be read now."""
        return [
            (sub, reading.error is not None or self._of[reading].error is not None)
            for sub, reading in list(self._readings.items())
            if reading in self._of
        ]

    def threads(self) -> list[ServiceThread]:
        """The threads that must be alive now."""
        return [*(reader.thread for reader in list(self._readers)), *self._pool.threads()]

    @property
    def is_own_thread(self) -> bool:
        """Whether the current thread is a reader's."""
        return threading.current_thread() in self.threads()

    def must_be_alone(self, sub: Subscription) -> bool:
        """Whether a topic needs a reader of its own."""
        return (
            self.store.has_nodes
            or self._is_sharing_refused
            or sub.limit is not self.runner.limit
            or sub.stats.degradation.is_degraded
            or self.handlers.batch(sub.topic, sub.wanted) is not None
        )

    def refuse_sharing(self) -> None:
        """Read topics one by one: the server, or a proxy before it, refuses to read several."""
        self._is_sharing_refused = True

    def open(self, all_wanted: Iterable[WantedTopic]) -> None:
        """Start to read topics, and those of `subscribe` from now on."""
        self.is_open = True
        for wanted in all_wanted:
            self._add_shards(wanted)
        self._start_new()

    def close(self) -> list[Subscription]:
        """Close all subscriptions, start to read no others, and return them."""
        with self._lock:
            self.is_open = False
            subs = list(self._readings)
        for sub in subs:
            sub.close()
        return subs

    def end_pool(self) -> None:
        """End the threads that read layouts."""
        self._pool.close()

    def has_ended(self, sub: Subscription) -> bool:
        """Whether no reader reads a closed topic any longer."""
        reading = self._readings.get(sub)
        return reading is not None and reading.ended.is_set()

    def remove(self, sub: Subscription) -> None:
        """Forget a subscription that has ended."""
        with self._lock:
            reading = self._readings.pop(sub, None)
            if reading is not None:
                self._of.pop(reading, None)
                self._by_topic[sub.topic].remove(sub)

    def subscribe(self, wanted: WantedTopic) -> None:
        """Read each shard of a topic, unless the topic is read already.

        Raises RuntimeError at the thread limit.
        """
        touched = self._add_shards(wanted)
        self._start_new()
        for reader in touched:
            reader.interrupt()

    def _add_shards(self, wanted: WantedTopic) -> set[Reader]:
        """Give each new shard of a topic to a reader; returns these readers."""
        with self._lock:
            self._wanted.setdefault((wanted.topic, wanted.group or ""), wanted)
        found = [self._add(wanted, shard) for shard in self._shards_of(wanted.topic)]
        return {reader for reader in found if reader is not None}

    def _start_new(self) -> None:
        """Start the threads of new readers. Raises RuntimeError at the thread limit."""
        with self._lock:
            new = [reader for reader in self._readers if reader.thread.ident is None]
            for reader in new:
                try:
                    reader.thread.start()
                except RuntimeError:
                    for failed in new[new.index(reader) :]:
                        self._forget(failed)
                    raise

    def _forget(self, reader: Reader) -> None:
        """Undo the addition of topics whose reader cannot be started."""
        del self._readers[reader]
        for reading in reader.joining:
            sub = reading.sub
            self._shards.get((Topic(sub.topic), sub.wanted), set()).discard(sub.shard)
            reading.ended.set()
            self.remove(sub)

    def _place(self, reading: ReadTopic) -> Reader:
        """Give a topic to a reader that has room, or to a new one; the caller holds the lock."""
        sub, is_alone = reading.sub, self.must_be_alone(reading.sub)
        for reader in self._readers:
            is_fit = reader.name == sub.name and reader.is_alone is is_alone and reader.has_room
            if is_fit and (not sub.group or reader.group in ("", sub.group)):
                break
        else:
            self._made += 1
            reader = Reader(self, self._made, sub.name, is_alone=is_alone)
            reader.group = sub.group
            self._readers[reader] = None
        reader.joining.append(reading)
        self._of[reading] = reader
        return reader

    def move(self, reading: ReadTopic, source: Reader) -> bool:
        """Give a topic to the reader that it needs; False if no thread can be started for it."""
        with self._lock:
            reader = self._place(reading)
            if reader.thread.ident is None:
                try:
                    reader.thread.start()
                except RuntimeError as error:
                    log.warning("topic %s: %s", reading.sub.shard, error)
                    del self._readers[reader]
                    self._of[reading] = source
                    return False
        reader.interrupt()
        return True

    def end(self, reader: Reader) -> bool:
        """Forget a reader without topics; returns False if it has got one meanwhile."""
        with self._lock:
            if reader.joining:
                return False
            self._readers.pop(reader, None)
            return True

    def _shards_of(self, topic: Topic) -> list[Shard]:
        return (self.store.known_layout(topic) or PLAIN).active(topic)

    def follow(self) -> None:
        """Start to read new shards, and stop to read removed ones.

        Raises LisaError at the end if a node does not answer. On a cluster, reads the layouts of
        all topics concurrently, because a node may hang.
        """
        with self._lock:
            all_wanted = list(self._wanted.values())
        together = 1 if self.store.has_nodes else max(1, len(all_wanted))
        failed: list[LisaError] = []
        parts = list(chunks(all_wanted, together))
        for part in parts[1:]:
            self._pool.start(part[0], partial(self._follow_part, part, failed))
        for part in parts[:1]:
            self._follow_part(part, failed)
        self._pool.wait()
        if failed:
            raise failed[0]

    def _follow_part(self, part: Sequence[WantedTopic], failed: list[LisaError]) -> None:
        try:
            self.store.drive(self.store.layouts([wanted.topic for wanted in part]))
        except LisaError as error:
            failed.append(error)
            return
        for wanted in part:
            self._follow_one(wanted)

    def _follow_one(self, wanted: WantedTopic) -> None:
        topic, group = wanted.topic, wanted.group or ""
        shards = self._shards_of(topic)
        with self._lock:
            known = set(self._shards.get((topic, group), ()))
        if set(shards) - known and self._is_declared(topic, group, known):
            try:
                self.subscribe(wanted)
            except RuntimeError as error:  # the thread limit is reached
                log.warning("topic %s: cannot read all shards, trying again: %s", topic, error)
                return
        for shard in known.difference(shards):
            self._leave_shard(shard, group)

    def _is_declared(self, topic: str, wanted: str, known: Container[Shard]) -> bool:
        """Whether the group still exists: a new subscription would declare a removed group again.

        Those of former shards may have lost the group only because their keys were deleted.
        """
        subs = [
            sub
            for sub in self.subscriptions()
            if sub.shard in known and sub.wanted == wanted and not sub.closing.is_set()
        ]
        if any(not sub.membership.is_removed for sub in subs):
            return True
        lost = {sub.group for sub in subs}
        return bool(lost) and not lost.isdisjoint(self.store.drive(self.store.groups(topic)))

    def _leave_shard(self, shard: Shard, group: str) -> None:
        """Stop reading a removed shard; the heartbeat removes the subscription."""
        with self._lock:
            self._shards.get((topic_of(shard), group), set()).discard(shard)
            left = [sub for sub in self._readings if sub.shard == shard and sub.wanted == group]
        for sub in left:
            sub.close()
        self.interrupt(left)

    def _add(self, wanted: WantedTopic, shard: Shard) -> Reader | None:
        """Give a shard to a reader, unless it has one; returns the reader."""
        group = wanted.group or ""
        with self._lock:
            known = self._by_topic.setdefault(wanted.topic, [])
            is_read = any(
                sub.shard == shard and not sub.closing.is_set() and sub.wanted == group
                for sub in known
            )
            if not self.is_open or (wanted.topic, group) not in self._wanted or is_read:
                return None
            name = handler_name(wanted.name) if wanted.name else self._name
            if any(sub.shard == shard and sub.name == name for sub in known):
                # An earlier subscription still holds deliveries under this name; to a reader with
                # the same name they would be entries whose reply was lost.
                name = f"{self._name}-{secrets.token_hex(3)}{HANDLER_SUFFIX}"
            self._shards.setdefault((wanted.topic, group), set()).add(shard)
            sub = self._new_subscription(shard, group, name)
            sub.pause(paused=any(other.is_paused_here for other in known if other.wanted == group))
            reading = self._readings[sub] = ReadTopic(sub)
            known.append(sub)
            return self._place(reading)

    def unsubscribe(self, topic: str) -> None:
        """Stop reading a topic and release unstarted deliveries.

        The heartbeat removes the subscriptions once their handlers have finished.
        """
        with self._lock:
            self._wanted = {key: one for key, one in self._wanted.items() if key[0] != topic}
            self._shards = {key: one for key, one in self._shards.items() if key[0] != topic}
            subs = [sub for sub in self._readings if sub.topic == topic]
        for sub in subs:
            sub.close()
        self.end_reading(subs, ShutdownCalls(self.store))

    def pause(self, topic: str | None, *, paused: bool) -> None:
        """Pause or resume reading in this consumer; `topic=None` means all topics."""
        with self._lock:  # subscriptions added later copy the state of existing ones
            subs = [sub for sub in self._readings if topic in (None, sub.topic)]
            for sub in subs:
                sub.pause(paused=paused)
        self.interrupt(subs)

    def interrupt(self, subs: Iterable[Subscription]) -> bool:
        """Interrupt the reads of topics; returns False if the server does not answer."""
        readers = {reader for _, reader in self._open_readings(subs)}
        for reader in readers:
            reader.wake()
        return all(reader.interrupt() for reader in readers)

    def end_reading(self, subs: Sequence[Subscription], last: ShutdownCalls) -> None:
        """Stop reading closed topics and release their unstarted deliveries."""
        taken = {sub: sub.withdraw() for sub in subs}
        last.make(lambda: self.interrupt(subs))
        give_back(taken, last)
        ends = time.monotonic() + last.left_s()
        for reading, reader in self._open_readings(subs):
            while not reading.ended.is_set() and not reader.is_handling:
                if reader.thread is threading.current_thread() or time.monotonic() > ends:
                    break
                last.make(reader.interrupt)
                reading.ended.wait(0.05)
        give_back({sub: sub.withdraw() for sub in subs}, last)

    def _open_readings(self, subs: Iterable[Subscription]) -> Iterator[tuple[ReadTopic, Reader]]:
        for sub in subs:
            reading = self._readings.get(sub)
            reader = None if reading is None else self._of.get(reading)
            if reading is not None and reader is not None and not reading.ended.is_set():
                yield reading, reader

    def join(self, subs: Iterable[Subscription], last: ShutdownCalls) -> None:
        """Wait for reads to end whose threads ran a handler when `end_reading` returned."""
        ends = time.monotonic() + last.left_s()
        for reading, _ in self._open_readings(subs):
            if not reading.sub.leases.running():
                reading.ended.wait(max(0.0, ends - time.monotonic()))
