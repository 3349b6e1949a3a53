"""Equal rows without ids that lie in several tasks: found when all tasks are done, and sent.

Each task numbers the equal rows it sees from 1 (see `identity`), so of three in one task and two in
another the ids 1, 2, 3 are sent, and 1, 2 are answered as duplicates. Five is what there should be:
4 and 5 are sent here. So the ids of a job are the same however its rows are spread over tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from lisa.core.errors import LisaError
from lisa.core.store import SyncStore, chunks
from lisa.core.transitions.inspect import Inspect
from lisa.pipeline.source.identity import DIGEST_BYTES, id_of
from lisa.pipeline.source.outcome import Spare, TaskResult
from lisa.pipeline.source.sending import Manner, Part, Sender

__all__ = ["complete", "spread"]

COMPLETING = -1
"""Stands for a partition in the tokens of what is sent here."""


def spread(results: Sequence[TaskResult]) -> dict[bytes, tuple[int, int]]:
    """Digests that several tasks met, with the ordinal that was reached and the one that is due."""
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
    by_digest = pa.concat_tables(tables).group_by("digest").aggregate(
        [("task", "count"), ("count_all", "max"), ("count_all", "sum")]
    )  # fmt: skip
    several = by_digest.filter(pc.greater(by_digest["task_count"], 1)).to_pydict()
    ends = zip(several["count_all_max"], several["count_all_sum"], strict=True)
    return dict(zip(several["digest"], ends, strict=True))


def complete(
    manner: Manner, store: SyncStore, run: str, results: Sequence[TaskResult], whole: TaskResult
) -> None:
    """Send what is missing, and count it in `whole`.

    Raises LisaError if there is something of which no task could keep the row.
    """
    missing = spread(results)
    if not missing:
        return
    spares: dict[bytes, Spare] = {}
    for one in results:
        spares.update(one.spares)
    unknown = [
        id_of(digest, ordinal)
        for digest, (reached, end) in missing.items() if digest not in spares
        for ordinal in range(reached + 1, end + 1)
    ]  # fmt: skip
    sender = Sender(manner, store, run, COMPLETING, whole)
    try:
        for topic in {spares[digest].topic for digest in missing if digest in spares}:
            _send(sender, topic, missing, spares, whole)
    finally:
        sender.close()
    left = _not_known(store, sorted(whole.topics), unknown)
    if left:
        raise LisaError(
            f"{left} rows were not sent: they equal rows of other tasks, and are too many to be "
            "told apart without ids. Call lisa.pipeline.schedule with the same job: it sends "
            "these, and nothing twice"
        )


def _send(
    sender: Sender, topic: str, missing: dict[bytes, tuple[int, int]],
    spares: dict[bytes, Spare], whole: TaskResult,
) -> None:  # fmt: skip
    rows = [
        (id_of(digest, ordinal), spare.due, spare.tail, spare.ttl_ms, spare.policy)
        for digest, spare in spares.items() if spare.topic == topic and digest in missing
        for ordinal in range(missing[digest][0] + 1, missing[digest][1] + 1)
    ]  # fmt: skip
    # Each of these was met as a duplicate of a row that it only equals.
    whole.counts(topic).duplicate -= len(rows)
    ids, dues, tails, ttls_ms, policies = zip(*rows, strict=True)
    for _ in sender.send(topic, Part(range(len(ids)), ids, dues, tails, ttls_ms, policies)):
        pass


def _not_known(store: SyncStore, topics: Sequence[str], ids: Sequence[str]) -> int:
    """How many of these the server has never heard of, or has forgotten."""
    left = set(ids)
    for topic in topics:
        for some in chunks(sorted(left), store.batch_size(topic, Inspect)):
            found = store.call_by_id(Inspect(topic, some))
            known = (told.envelope or told.tombstone for told in found)
            left -= {one for one, is_known in zip(some, known, strict=True) if is_known}
    return len(left)
