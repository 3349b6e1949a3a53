"""Works on many ids by topic, on Spark's workers and in calls of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from lisa.core.model.sharding import PLAIN, Topic
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store, SyncStore, chunks, grouped
from lisa.core.transitions.base import STEPS_PER_CALL
from lisa.core.transitions.inspect import Inspect, Inspection
from lisa.pipeline.source.read_columns import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from lisa.pipeline.server import Server

Row = dict[str, Any]
Mapped = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""Record batches -> record batches; called once for each task (see `DataFrame.mapInArrow`)."""


def mapped_by_topic(
    server: Server,
    schema: StructType,
    work: Callable[[SyncStore, str, list[Row]], Iterable[list[Row]]],
) -> Mapped:
    """Calls `work` for each topic in a batch, with its rows; it returns lists of rows of `schema`.

    Each task uses one connection.
    """

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with server.open() as store:
            for batch in batches:
                parts = grouped((str(row["topic"]), row) for row in batch.to_pylist())
                for topic, rows in parts.items():
                    for made in work(store, topic, rows):
                        yield pa.RecordBatch.from_pylist(made, schema=arrow_schema(schema))

    return task


def inspected(store: Store, topic: str, ids: Sequence[str]) -> Flow[list[Inspection]]:
    """The state of each id, without bodies."""
    found: list[Inspection] = []
    for part in chunks(ids, store.batch_size(topic, Inspect)):
        found += yield from store.run_by_id(Inspect(topic, part, bodies=False))
    return found


def known(
    store: Store, topic: str, ids: Sequence[str], counts: Sequence[int] = ()
) -> Flow[dict[str, Inspection]]:
    """Id -> inspection, for ids that the server knows, live or by a tombstone.

    Needs only two commands per STEPS_PER_CALL ids if the server knows none of them, which is the
    usual case after a loss.

    counts: shard counts that the topic has had; searched if its server has lost the layout.
    """
    keys, layout = store.keys.topic(topic), (yield from store.layout(Topic(topic)))
    found: dict[str, Inspection] = {}
    for part in chunks(ids, STEPS_PER_CALL):
        live, settled = yield from store.commands(
            [
                ("EXISTS", *map(keys.body, part)),
                ("EXISTS", *map(keys.done, part)),
            ]
        )
        if live or settled or layout.is_split:
            seen = yield from inspected(store, topic, part)
            found |= _there(part, seen)
        for count in () if layout.number else counts:
            there = yield from _in_shards(store, topic, part, count)
            found |= {
                message_id: inspection
                for message_id, inspection in there.items()
                if inspection.envelope or message_id not in found
            }
    return found


def _in_shards(
    store: Store, topic: str, ids: Sequence[str], count: int
) -> Flow[dict[str, Inspection]]:
    """The ids that a shard knows if the topic has `count` shards; ignores the stored layout."""
    found: dict[str, Inspection] = {}
    shards = grouped(
        (PLAIN.shard_for(Topic(topic), message_id, count), message_id) for message_id in ids
    )
    for shard, own in shards.items():
        for part in chunks(own, store.batch_size(shard, Inspect)):
            found |= _there(part, (yield from store.run(Inspect(shard, part, bodies=False))))
    return found


def _there(ids: Sequence[str], seen: Sequence[Inspection]) -> dict[str, Inspection]:
    pairs = zip(ids, seen, strict=True)
    return {
        message_id: inspection
        for message_id, inspection in pairs
        if inspection.envelope or inspection.tombstone
    }
