"""Derives ids for rows without ids, and send tokens, so that a repeated job adds nothing.

A row's id is derived from the job's name, the row's content and its ordinal among equal rows. It is
independent of the row's partition and of the attempt of the task, and is the same when the job is
repeated. Ordinals are counted within a task, so equal rows in several tasks get the same ids;
`lisa.pipeline.source.identity` corrects this at the end.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from hashlib import blake2b
from itertools import repeat

import pyarrow as pa
import pyarrow.compute as pc

from lisa.core.model.errors import LisaError
from lisa.core.store.store import SyncStore, chunks
from lisa.core.transitions.inspect import Inspect
from lisa.pipeline.source.outcome import DuplicateRow, TaskResult
from lisa.pipeline.source.rows import MessageColumns
from lisa.pipeline.source.sending import Sender, SendPart, WriteOptions

DIGEST_BYTES = 12
MOST_SEEN = 1_000_000
"""Maximum number of ids per token; bounds the memory of a task."""


def id_of(digest: bytes, ordinal: int) -> str:
    """The id of the nth row with this digest; ordinals begin at 1."""
    return digest.hex() if ordinal == 1 else f"{digest.hex()}-{ordinal}"


def digest_of(message_id: str) -> bytes:
    """The digest in an id that `id_of` made."""
    return bytes.fromhex(message_id[: 2 * DIGEST_BYTES])


class Identity:
    """Assigns ids to the rows of one task."""

    def __init__(self, job: str) -> None:
        self._seeded = blake2b(job.encode() + b"\0", digest_size=DIGEST_BYTES)
        self._seen: set[bytes] = set()
        self._again: Counter[bytes] = Counter()

    def ids(self, rows: MessageColumns) -> list[str]:
        """One id per row, in order."""
        digests = self._digests(rows)
        seen, again = self._seen, self._again
        fresh = set(digests)
        if len(fresh) == len(digests) and seen.isdisjoint(fresh):
            seen |= fresh
            return [digest.hex() for digest in digests]
        made = []
        for digest in digests:
            if digest in seen:
                again[digest] += 1
                made.append(id_of(digest, again[digest] + 1))
            else:
                seen.add(digest)
                made.append(digest.hex())
        return made

    def _digests(self, rows: MessageColumns) -> list[bytes]:
        columns = zip(
            rows.asked,
            rows.ttls_ms,
            rows.policies,
            rows.topics or repeat(""),
            rows.tails,
            strict=False,
        )
        start = self._seeded.copy
        digests = []
        for due, ttl_ms, policy, topic, tail in columns:
            digesting = start()
            digesting.update(b"%b%b" % (f"{due}\n{ttl_ms}\n{policy}\n{topic}\n".encode(), tail))
            digests.append(digesting.digest())
        return digests


class Tokens:
    """Send tokens of one task and topic; equal in every attempt, independent of the order of rows.

    All calls share one token, so that a row repeated by another attempt gets the first answer
    again. If an id occurs twice within a task, the second row is another message and starts a new
    token.
    """

    def __init__(self, run: str, partition: int, topic: str) -> None:
        self._about = f"{run}\n{partition}\n{topic}\n"
        self._generation = -1
        self._seen: set[int] = set()
        self._next()

    def token_for(self, ids: Sequence[str]) -> str:
        """The token of the call that sends these ids."""
        hashes = set(map(hash, ids))
        if len(self._seen) >= MOST_SEEN or not self._seen.isdisjoint(hashes):
            self._next()
        self._seen |= hashes
        return self._token

    def _next(self) -> None:
        self._generation += 1
        self._seen.clear()
        digest = blake2b(f"{self._about}{self._generation}".encode(), digest_size=6).digest()
        # The tilde makes the scripts keep tombstones for `dedupe_for`.
        self._token = "~" + urlsafe_b64encode(digest).decode()[:7]


COMPLETING = -1
"""Used instead of a partition number in the send tokens of this module."""


def shared_digests(results: Sequence[TaskResult]) -> dict[bytes, tuple[int, int]]:
    """Digest of rows found in several tasks -> highest ordinal sent, and highest ordinal needed."""
    met = [one.digests for one in results if one.digests]
    if len(met) < 2:
        return {}
    tables = []
    for number, digests in enumerate(met):
        count = len(digests) // DIGEST_BYTES
        kind = pa.binary(DIGEST_BYTES)
        column = pa.Array.from_buffers(kind, count, [None, pa.py_buffer(digests)])
        counted = pa.table({"digest": column}).group_by("digest").aggregate([([], "count_all")])
        tables.append(counted.append_column("task", pa.array([number] * len(counted), pa.int32())))
    by_digest = (
        pa.concat_tables(tables)
        .group_by("digest")
        .aggregate([("task", "count"), ("count_all", "max"), ("count_all", "sum")])
    )
    several = by_digest.filter(pc.greater(by_digest["task_count"], 1)).to_pydict()
    ends = zip(several["count_all_max"], several["count_all_sum"], strict=True)
    return dict(zip(several["digest"], ends, strict=True))


def send_missing(
    options: WriteOptions,
    store: SyncStore,
    run: str,
    results: Sequence[TaskResult],
    whole: TaskResult,
) -> None:
    """Send the missing rows, and add them to the counts of `whole`.

    Raises LisaError if no task kept a copy of a missing row.
    """
    missing = shared_digests(results)
    if not missing:
        return
    duplicates: dict[bytes, DuplicateRow] = {}
    for one in results:
        duplicates.update(one.duplicates)
    unknown = [
        id_of(digest, ordinal)
        for digest, (reached, end) in missing.items()
        if digest not in duplicates
        for ordinal in range(reached + 1, end + 1)
    ]
    with closing(Sender(options, store, run, COMPLETING, whole)) as sender:
        for topic in {duplicates[digest].topic for digest in missing if digest in duplicates}:
            _send(sender, topic, missing, duplicates, whole)
    left = _not_known(store, sorted(whole.topics), unknown)
    if left:
        raise LisaError(
            f"{left} rows were not sent: they equal rows of other tasks, and there are too many of "
            "them to keep. Call lisa.pipeline.schedule with the same job: it sends these rows, and "
            "none twice"
        )


def _send(
    sender: Sender,
    topic: str,
    missing: dict[bytes, tuple[int, int]],
    duplicates: dict[bytes, DuplicateRow],
    whole: TaskResult,
) -> None:
    rows = [
        (id_of(digest, ordinal), row.due, row.tail, row.ttl_ms, row.policy)
        for digest, row in duplicates.items()
        if row.topic == topic and digest in missing
        for ordinal in range(missing[digest][0] + 1, missing[digest][1] + 1)
    ]
    # Each of these rows was counted as a duplicate before.
    whole.counts(topic).duplicate -= len(rows)
    ids, dues, tails, ttls_ms, policies = zip(*rows, strict=True)
    for _ in sender.send(topic, SendPart(range(len(ids)), ids, dues, tails, ttls_ms, policies)):
        pass


def _not_known(store: SyncStore, topics: Sequence[str], ids: Sequence[str]) -> int:
    """How many of these ids the server does not know, neither live nor by a tombstone."""
    left = set(ids)
    for topic in topics:
        for some in chunks(sorted(left), store.batch_size(topic, Inspect)):
            found = store.call_by_id(Inspect(topic, some))
            known = (seen.envelope or seen.tombstone for seen in found)
            left -= {one for one, is_known in zip(some, known, strict=True) if is_known}
    return len(left)
