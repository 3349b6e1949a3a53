"""Sends equal rows without ids that several tasks mistook for duplicates.

Each task numbers its equal rows from 1 (see `identity`). If one task has three of them and another
task two, ids 1, 2, 3 and 1, 2 are sent, and the last two are answered as duplicates. There must be
five messages, so ids 4 and 5 are sent here, once all tasks have finished. The ids of a job are
thus independent of how its rows are distributed over tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import pyarrow as pa
import pyarrow.compute as pc

from lisa.core.model.errors import LisaError
from lisa.core.store.store import SyncStore, chunks
from lisa.core.transitions.inspect import Inspect
from lisa.pipeline.source.identity import DIGEST_BYTES, id_of
from lisa.pipeline.source.outcome import DuplicateRow, TaskResult
from lisa.pipeline.source.sending import Sender, SendPart, WriteOptions

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
