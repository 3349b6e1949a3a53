"""What one task of a write does: rows of Arrow batches to script calls."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import TypeVar

import pyarrow as pa

from lisa.core.clock import duration_ms
from lisa.core.envelope import HEAD_BYTES, encode_head
from lisa.core.errors import InvalidMessage, LisaError, TopicFull
from lisa.core.spread import spread
from lisa.core.store import SyncStore
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.enqueue import Enqueue, OnDuplicate, Sent
from lisa.pipeline.source.columns import Rows, read_rows
from lisa.pipeline.source.identity import Identity, Tokens, digest_of
from lisa.pipeline.source.outcome import Spare, TaskResult
from lisa.pipeline.source.pace import Pace
from lisa.pipeline.source.refused import Refused
from lisa.producer.calls import fitting

__all__ = ["Manner", "Sender", "Task"]

T = TypeVar("T")

REGISTER_EVERY_S = 20.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
SPARE_BYTES = 4 << 20
"""What one task may hand to the driver in rows that may have to be sent under another ordinal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How rows are to be sent: what the options say of it."""

    url: str
    prefix: str
    topic: str | None = None
    on_duplicate: OnDuplicate = OnDuplicate.KEEP
    batch: int | None = None
    max_rate: float | None = None
    job: str | None = None
    dedupe_for: timedelta | None = None
    refused: str | None = None
    patience: timedelta = timedelta(seconds=10)
    json_text: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """Messages of one topic, by columns; `numbers` are their places in the Arrow batch."""

    numbers: Sequence[int]
    ids: Sequence[str]
    dues: Sequence[str]
    tails: Sequence[bytes]
    ttls_ms: Sequence[int | None]
    policies: Sequence[str | None]

    def cut(self, start: int, end: int | None = None) -> Part:
        """Some of them."""
        part = slice(start, end)
        return Part(self.numbers[part], self.ids[part], self.dues[part], self.tails[part],
                    self.ttls_ms[part], self.policies[part])  # fmt: skip

    def picked(self, places: Sequence[int]) -> Part:
        """Those at some places."""
        return Part(
            _picked(self.numbers, places), _picked(self.ids, places), _picked(self.dues, places),
            _picked(self.tails, places), _picked(self.ttls_ms, places),
            _picked(self.policies, places),
        )  # fmt: skip


def _picked(column: Sequence[T], places: Sequence[int]) -> list[T]:
    return [column[place] for place in places]


class Sender:
    """Sends messages of any topics, and counts what became of them."""

    def __init__(
        self, manner: Manner, store: SyncStore, run: str, partition: int, result: TaskResult
    ) -> None:
        self._manner = manner
        self._store = store
        self._about = (run, partition)
        self._tokens: dict[str, Tokens] = {}
        self._registered: dict[str, float] = {}
        self._largest: dict[str, int] = {}
        self._full_since: float | None = None
        self._pace = Pace(store, run, manner.max_rate) if manner.max_rate else None
        self._result = result
        self._refused = Refused(manner.refused, f"refused-{run}-{partition}", result)
        self.batch: pa.RecordBatch | None = None
        """Where the messages that are sent next come from."""

    def send(self, topic: str, part: Part) -> Iterator[tuple[Part, Sequence[Sent]]]:
        """Send messages of one topic; what became of those that were not refused, call by call.

        Raises LisaError where the server does not answer, or refuses all.
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
        """Note a row that is not sent."""
        self._refused.add(self.batch, number, topic, message_id, reason)

    def close(self) -> None:
        """Finish what was written beside."""
        self._refused.close()

    def _size(self, topic: str) -> int:
        size = self._store.batch_size(topic, Enqueue)
        if self._manner.batch:
            size = min(size, self._manner.batch)
        return min(size, self._pace.allowance) if self._pace else size

    def _open(self, topic: str) -> None:
        """Make the topic known, now and again; at first, learn of it and lengthen its memory."""
        seen, now = self._registered.get(topic), time.monotonic()
        if seen is not None and now - seen < REGISTER_EVERY_S:
            return
        drive, store = self._store.drive, self._store
        drive(store.register([topic]))
        if seen is None:
            drive(store.groups(topic))
            options = drive(store.options(topic))
            wanted = self._manner.dedupe_for
            if wanted is not None and wanted > options.dedupe_for:
                store.call(Configure(topic, {"dedupe_for": str(duration_ms(wanted))}))
                drive(spread(store, topic))
            self._largest[topic] = options.max_body_bytes
            self._tokens[topic] = Tokens(*self._about, topic)
        self._registered[topic] = now

    def _without_large(self, topic: str, part: Part) -> Part:
        """Refuse bodies that the topic does not take before they travel there."""
        limit, before_headers = self._largest[topic], HEAD_BYTES - 10
        longest = limit + before_headers
        if max(map(len, part.tails), default=0) <= longest:
            return part
        kept = []
        for place, tail in enumerate(part.tails):
            size = len(tail) - before_headers - int(tail[1:before_headers], 16)
            if size <= limit:
                kept.append(place)
                continue
            reason = (f"the body has {size} bytes; topic {topic!r} takes at most {limit} "
                      "(its option max_body_bytes)")  # fmt: skip
            self.refuse(topic, part.numbers[place], part.ids[place], reason)
        return part.picked(kept)

    def _call(self, topic: str, token: str, part: Part) -> Iterator[tuple[Part, list[Sent]]]:
        """Send what fits one call, in several where some of it is refused."""
        left, size = part, len(part.ids)
        while left.ids:
            one = left.cut(0, size)
            try:
                outcomes = self._patient(topic, token, one)
                if size >= len(part.ids):
                    self._full_since = None  # there was room without looking for the last of it
            except (InvalidMessage, TopicFull) as error:
                if size > 1:
                    size = (size + 1) // 2  # the good ones among them are found by halving
                    continue
                layout = self._store.known_layout(topic)
                if isinstance(error, TopicFull) and not (layout and layout.is_split):
                    self._refuse_all(topic, left, error)
                    return
                self._refuse_all(topic, one, error)
                left, size = left.cut(1), len(part.ids)
                continue
            yield one, outcomes
            left = left.cut(size)

    def _patient(self, topic: str, token: str, part: Part) -> list[Sent]:
        """One script call. A full topic may be waited for, but not again for each call."""
        head = encode_head(token)
        alike = part.dues.count(part.dues[0]) == len(part.dues)
        call = Enqueue(
            topic, token, part.ids, part.dues[:1] if alike else part.dues,
            [head + tail for tail in part.tails], part.ttls_ms, part.policies,
            self._manner.on_duplicate,
        )  # fmt: skip
        pause = FIRST_PAUSE_S
        while True:
            if self._pace is not None:
                self._pace.wait_for(len(part.ids))
            try:
                return self._store.call_by_id(call)
            except TopicFull:
                now = time.monotonic()
                if self._full_since is None:
                    self._full_since = now
                left = self._full_since + self._manner.patience.total_seconds() - now
                if left <= 0:
                    raise
                time.sleep(min(pause, left))
                pause = min(2 * pause, LONGEST_PAUSE_S)

    def _refuse_all(self, topic: str, part: Part, error: LisaError) -> None:
        for number, one in zip(part.numbers, part.ids, strict=True):
            self.refuse(topic, number, one, str(error))

    def _count(self, topic: str, part: Part, outcomes: Sequence[Sent]) -> None:
        counts = self._result.counts(topic)
        counts.accepted += outcomes.count(Sent.ACCEPTED)
        counts.duplicate += outcomes.count(Sent.DUPLICATE)
        counts.replaced += outcomes.count(Sent.REPLACED)
        if Sent.REJECTED not in outcomes:
            return
        for place, outcome in enumerate(outcomes):
            if outcome is Sent.REJECTED:
                reason = "the id is known already (on_duplicate=reject)"
                self.refuse(topic, part.numbers[place], part.ids[place], reason)


class Task:
    """Sends the rows of one partition."""

    def __init__(
        self, manner: Manner, store: SyncStore, *, run: str, partition: int, job: str | None
    ) -> None:
        self._manner = manner
        self._result = TaskResult()
        self._sender = Sender(manner, store, run, partition, self._result)
        self._identity = Identity(job) if job is not None else None
        self._digests = bytearray()
        self._spare_bytes = 0

    def run(self, batches: Iterable[pa.RecordBatch]) -> TaskResult:
        """Send all. Raises LisaError."""
        try:
            for batch in batches:
                self._sender.batch = batch
                self._send(read_rows(batch, json_text=self._manner.json_text))
        finally:
            self._sender.close()
        self._result.digests = bytes(self._digests)
        return self._result

    def _send(self, rows: Rows) -> None:
        for number, reason in sorted(rows.refused.items()):
            topic = self._manner.topic or (rows.topics or ())[number]
            self._sender.refuse(topic, number, rows.ids[number] if rows.ids else None, reason)
        numbers, rows = rows.good()
        ids = (rows.ids or ()) if self._identity is None else self._identity.ids(rows)
        whole = Part(numbers, ids, rows.dues, rows.tails, rows.ttls_ms, rows.policies)
        for topic, part in self._by_topic(rows.topics, whole):
            for sent, outcomes in self._sender.send(topic, part):
                if self._identity is not None:
                    self._remember(topic, sent, outcomes)

    def _by_topic(self, topics: Sequence[str] | None, whole: Part) -> Iterator[tuple[str, Part]]:
        if topics is None:
            yield self._manner.topic or "", whole
            return
        places: dict[str, list[int]] = defaultdict(list)
        for place, topic in enumerate(topics):
            places[topic].append(place)
        for topic, some in places.items():
            yield topic, whole.picked(some)

    def _remember(self, topic: str, part: Part, outcomes: Sequence[Sent]) -> None:
        """Keep what kinds of rows there were; of those whose id was known, the rows themselves.

        An equal one may lie in another task: this one is then sent under another ordinal.
        """
        self._digests += b"".join(map(digest_of, part.ids))
        if outcomes.count(Sent.ACCEPTED) == len(outcomes):
            return
        for place, outcome in enumerate(outcomes):
            if outcome is Sent.ACCEPTED:
                continue
            self._spare_bytes += len(part.tails[place]) + 100
            if self._spare_bytes > SPARE_BYTES:
                return
            self._result.spares[digest_of(part.ids[place])] = Spare(
                topic, part.dues[place], part.tails[place], part.ttls_ms[place],
                part.policies[place],
            )  # fmt: skip
