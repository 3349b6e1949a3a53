"""One task of a write: converts the Arrow batches of a partition to messages and sends them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing

import pyarrow as pa

from lisa.core.store.store import SyncStore
from lisa.core.transitions.enqueue import Sent
from lisa.pipeline.source.identity import Identity, digest_of
from lisa.pipeline.source.outcome import DuplicateRow, TaskResult
from lisa.pipeline.source.rows import MessageColumns, read_rows
from lisa.pipeline.source.sending import Sender, SendPart, WriteOptions

DUPLICATE_BYTES = 4 << 20
"""Maximum size of the duplicate rows that one task returns to the driver."""


class Task:
    """Sends the rows of one partition."""

    def __init__(
        self, options: WriteOptions, store: SyncStore, *, run: str, partition: int, job: str | None
    ) -> None:
        self._options = options
        self._result = TaskResult()
        self._sender = Sender(options, store, run, partition, self._result)
        self._identity = Identity(job) if job is not None else None
        self._digests = bytearray()
        self._duplicate_bytes = 0

    def run(self, batches: Iterable[pa.RecordBatch]) -> TaskResult:
        """Send all rows. Raises LisaError if the server does not answer."""
        with closing(self._sender):
            for batch in batches:
                self._sender.batch = batch
                self._send(read_rows(batch, json_text=self._options.json_text))
        self._result.digests = bytes(self._digests)
        return self._result

    def _send(self, rows: MessageColumns) -> None:
        for number, reason in sorted(rows.refused.items()):
            topic = self._options.topic or (rows.topics or ())[number]
            self._sender.refuse(topic, number, rows.ids[number] if rows.ids else None, reason)
        numbers, rows = rows.good()
        ids = (rows.ids or ()) if self._identity is None else self._identity.ids(rows)
        whole = SendPart(numbers, ids, rows.dues, rows.tails, rows.ttls_ms, rows.policies)
        for topic, part in self._by_topic(rows.topics, whole):
            for sent, outcomes in self._sender.send(topic, part):
                if self._identity is not None and not self._options.together:
                    self._remember(topic, sent, outcomes)

    def _by_topic(
        self, topics: Sequence[str] | None, whole: SendPart
    ) -> Iterator[tuple[str, SendPart]]:
        if topics is None:
            yield self._options.topic or "", whole
            return
        positions: dict[str, list[int]] = defaultdict(list)
        for index, topic in enumerate(topics):
            positions[topic].append(index)
        for topic, some in positions.items():
            yield topic, whole.picked(some)

    def _remember(self, topic: str, part: SendPart, outcomes: Sequence[Sent]) -> None:
        """Keep the digests of all rows, and the rows that were answered as duplicates.

        If another task has equal rows, the duplicates are sent again with other ordinals.
        """
        self._digests += b"".join(map(digest_of, part.ids))
        if outcomes.count(Sent.ACCEPTED) == len(outcomes):
            return
        for index, outcome in enumerate(outcomes):
            if outcome is Sent.ACCEPTED:
                continue
            self._duplicate_bytes += len(part.tails[index]) + 100
            if self._duplicate_bytes > DUPLICATE_BYTES:
                return
            self._result.duplicates[digest_of(part.ids[index])] = DuplicateRow(
                topic,
                part.dues[index],
                part.tails[index],
                part.ttls_ms[index],
                part.policies[index],
            )
