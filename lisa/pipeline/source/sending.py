"""Sends messages of a write at a rate that all tasks of a job share, and counts the outcomes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Self

import pyarrow as pa

from lisa.core.model.backoff import Backoff
from lisa.core.model.clock import duration_ms
from lisa.core.model.envelope import HEAD_BYTES, encode_head
from lisa.core.model.errors import InvalidMessage, KeyFull, LisaError, TopicFull
from lisa.core.model.sharding import Topic
from lisa.core.store.placing import note_local
from lisa.core.store.reshard import spread
from lisa.core.store.store import SyncStore
from lisa.core.transitions.enqueue import Enqueue, OnDuplicate, Sent
from lisa.core.transitions.topic import Configure
from lisa.pipeline.server import Server
from lisa.pipeline.source.identity import Tokens
from lisa.pipeline.source.outcome import Refused, TaskResult
from lisa.pipeline.source.rows import MessageColumns
from lisa.producer.calls import fitting

REGISTER_EVERY_S = 20.0
LONGEST_FULL_S = 1.0
"""Maximum pause before a message is sent again to a full topic."""


BURST_S = 0.1
"""Length of a window in seconds; longer if the rate allows less than one row in this time."""

KEPT_MS = 60_000
"""Minimum time for which a window's count is kept; must exceed the clock skew between machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """The parsed options of a write.

    machine: the driver's, as from `files.machine`.
    fail_if_full: raise if a topic or key stays full, instead of refusing rows.
    permissive: do not fail because of refused rows.
    together: all equal rows are in one task, so that tasks need not report what they sent.
    has_local: whether rows have wall times, which managers follow.
    due_in: only rows due after the first and until the second time, epoch ms; None for all.
    """

    server: Server
    topic: str | None = None
    on_duplicate: OnDuplicate = OnDuplicate.KEEP
    batch: int | None = None
    max_rate: float | None = None
    job: str | None = None
    dedupe_for: timedelta | None = None
    refused: str | None = None
    machine: str | None = None
    json_text: bool = False
    fail_if_full: bool = False
    permissive: bool = False
    together: bool = False
    has_local: bool = False
    due_in: tuple[int, int] | None = None


class Sender:
    """Sends messages of any topics, and counts their outcomes."""

    def __init__(
        self, options: WriteOptions, store: SyncStore, run: str, partition: int, result: TaskResult
    ) -> None:
        self._options = options
        self._store = store
        self._about = (run, partition)
        self._tokens: dict[str, Tokens] = {}
        self._registered: dict[str, float] = {}
        self._largest: dict[str, int] = {}
        self._full_since: float | None = None
        self._left_out: KeyFull | None = None
        self._pauses = Backoff(longest_s=LONGEST_FULL_S)
        self._pace = SharedRate(store, run, options.max_rate) if options.max_rate else None
        self._result = result
        self._refused = Refused(
            options.refused, f"refused-{run}-{partition}", result, machine=options.machine
        )
        self.batch: pa.RecordBatch | None = None
        """The Arrow batch of the messages being sent."""

    def send(
        self, topic: str, part: MessageColumns
    ) -> Iterator[tuple[MessageColumns, Sequence[Sent]]]:
        """Send messages of one topic; yields sent messages and their outcomes, call by call.

        Refused messages are recorded, not yielded. Raises LisaError if the server does not answer
        or rejects the whole call.
        """
        self._open(topic)
        part = self._without_large(topic, part)
        lengths = list(map(len, part.tails))
        size = self._size(topic)
        start = 0
        while start < len(lengths):
            end = start + fitting(islice(lengths, start, None), size)
            one = part.cut(start, end)
            token = self._tokens[topic].token_for(one.ids)
            for sent, outcomes in self._call(topic, token, one):
                self._count(topic, sent, outcomes)
                yield sent, outcomes
            start = end

    def refuse(self, topic: str, number: int, message_id: str | None, reason: str) -> None:
        """Record a row that is not sent."""
        self._refused.add(self.batch, number, topic, message_id, reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file of refused rows. Raises KeyFull if messages were left out."""
        self._refused.close()
        if kind is None and self._left_out is not None:
            raise self._left_out

    def _size(self, topic: str) -> int:
        size = self._store.batch_size(topic, Enqueue)
        if self._options.batch:
            size = min(size, self._options.batch)
        return min(size, self._pace.allowance) if self._pace else size

    def _open(self, topic: str) -> None:
        """Register the topic every REGISTER_EVERY_S; on first use, read and adjust its options."""
        seen, now = self._registered.get(topic), time.monotonic()
        if seen is not None and now - seen < REGISTER_EVERY_S:
            return
        drive, store = self._store.drive, self._store
        drive(store.register([topic]))
        if seen is None:
            drive(store.groups(topic))
            options = drive(store.options(topic))
            wanted = self._options.dedupe_for
            if wanted is not None and wanted > options.dedupe_for:
                store.call(Configure(topic, {"dedupe_for": str(duration_ms(wanted))}))
                drive(spread(store, Topic(topic)))
            self._largest[topic] = options.max_body_bytes
            self._tokens[topic] = Tokens(*self._about, topic)
        self._registered[topic] = now

    def _without_large(self, topic: str, part: MessageColumns) -> MessageColumns:
        """Refuse bodies above the topic's limit before sending them."""
        limit, before_headers = self._largest[topic], HEAD_BYTES - 10
        longest = limit + before_headers
        if max(map(len, part.tails), default=0) <= longest:
            return part
        kept = []
        for index, tail in enumerate(part.tails):
            size = len(tail) - before_headers - int(tail[1:before_headers], 16)
            if size <= limit:
                kept.append(index)
                continue
            reason = (
                f"the body has {size} bytes; topic {topic!r} accepts at most {limit} "
                "(option max_body_bytes)"
            )
            self.refuse(topic, part.numbers[index], part.ids[index], reason)
        return part.picked(kept)

    def _call(
        self, topic: str, token: str, part: MessageColumns
    ) -> Iterator[tuple[MessageColumns, list[Sent]]]:
        """Send one call; split it if some of its messages are rejected, and wait for room."""
        left, size, has_waited = part, len(part.ids), False
        while left.ids:
            one = left.cut(0, size)
            try:
                outcomes = self._enqueue(topic, token, one)
            except (InvalidMessage, TopicFull) as error:
                if len(one.ids) > 1:
                    size = (len(one.ids) + 1) // 2  # find the valid messages, and fill the room
                elif isinstance(error, TopicFull) and self._wait_for_room():
                    has_waited = True
                else:
                    refused = self._refused_with(topic, left, error)
                    left, size, has_waited = left.cut(refused), len(part.ids), False
                continue
            if has_waited or size >= len(part.ids):
                self._full_since, has_waited = None, False
            yield one, outcomes
            left, size = left.cut(size), min(2 * size, len(part.ids))

    def _enqueue(self, topic: str, token: str, part: MessageColumns) -> list[Sent]:
        """Send one script call."""
        head = encode_head(token)
        alike = part.dues.count(part.dues[0]) == len(part.dues)
        call = Enqueue(
            topic,
            part.ids,
            part.dues[:1] if alike else part.dues,
            [head + tail for tail in part.tails],
            part.ttls_ms,
            part.policies,
            self._options.on_duplicate,
            has_local=self._options.has_local,
        )
        if call.has_local:
            self._store.drive(note_local(self._store, call))
        if self._pace is not None:
            self._pace.wait_for(len(part.ids))
        return self._store.call_by_id(call)

    def _wait_for_room(self) -> bool:
        """Pause before a message is sent again; False once `patience` has passed without room."""
        now = time.monotonic()
        if self._full_since is None:
            self._full_since = now
            self._pauses.reset()
        left = self._full_since + self._options.server.patience.total_seconds() - now
        if left <= 0:
            return False
        time.sleep(self._pauses.take(left))
        return True

    def _refused_with(self, topic: str, left: MessageColumns, error: LisaError) -> int:
        """Refuse the first messages, for which another call would be in vain; returns how many.

        If there may be room later, and the task is to be repeated then: raises the error of a full
        topic, and leaves out the message of a full key; the end of the block raises.
        """
        if isinstance(error, TopicFull) and self._options.fail_if_full:
            if not isinstance(error, KeyFull):
                raise error
            self._left_out = self._left_out or error
            return 1
        layout = self._store.known_layout(Topic(topic))
        is_full = isinstance(error, TopicFull) and not isinstance(error, KeyFull)
        refused = left if is_full and not (layout and layout.is_split) else left.cut(0, 1)
        self._refuse_all(topic, refused, error)
        return len(refused.ids)

    def _refuse_all(self, topic: str, part: MessageColumns, error: LisaError) -> None:
        self._result.is_full |= isinstance(error, TopicFull)
        for number, one in zip(part.numbers, part.ids, strict=True):
            self.refuse(topic, number, one, str(error))

    def _count(self, topic: str, part: MessageColumns, outcomes: Sequence[Sent]) -> None:
        counts = self._result.counts(topic)
        counts.accepted += outcomes.count(Sent.ACCEPTED)
        counts.duplicate += outcomes.count(Sent.DUPLICATE)
        counts.replaced += outcomes.count(Sent.REPLACED)
        counts.replaced_in_flight += outcomes.count(Sent.REPLACED_IN_FLIGHT)
        counts.updated += outcomes.count(Sent.UPDATED)
        if Sent.REJECTED not in outcomes:
            return
        for index, outcome in enumerate(outcomes):
            if outcome is Sent.REJECTED:
                reason = "the id already exists (on_duplicate=reject)"
                self.refuse(topic, part.numbers[index], part.ids[index], reason)


class SharedRate:
    """A rate limit in rows per second, shared by tasks on any number of machines.

    Time is divided into windows. Before a task sends, it adds its rows to the window's counter on
    the server, and waits for the next window if the counter exceeds the limit. Unused capacity
    expires: a delayed job does not catch up at the cost of live traffic.
    """

    def __init__(self, store: SyncStore, run: str, rate: float) -> None:
        self._store = store
        self._run = run
        self.allowance = max(1, math.floor(rate * BURST_S))
        """Maximum number of rows per window, and thus per call."""
        self._window_s = self.allowance / rate
        self._kept_ms = KEPT_MS + math.ceil(1000 * self._window_s)

    def wait_for(self, rows: int) -> None:
        """Block until `rows` rows (at most `allowance`) may be sent."""
        while True:
            now = time.time()
            window = int(now / self._window_s)
            key = self._store.keys.pace(self._run, window)
            used, _ = self._store.drive(
                self._store.commands([("INCRBY", key, rows), ("PEXPIRE", key, self._kept_ms)])
            )
            if int(used) <= self.allowance:
                return
            if int(used) - rows < self.allowance:
                # Smaller calls of other tasks may still fit into this window.
                self._store.ask("DECRBY", key, rows)
            time.sleep(max(0.0, (window + 1) * self._window_s - time.time()) + 0.001)
