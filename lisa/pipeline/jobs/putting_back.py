"""What Spark's workers do in a restore: judge rows, ask the server, put messages back, cancel.

Each function here maps Arrow batches to Arrow batches with one connection for a task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from lisa.core.clock import duration_ms
from lisa.core.envelope import fence_of
from lisa.core.errors import GroupRemoved, InvalidMessage, LisaError
from lisa.core.store import SyncStore
from lisa.core.transitions.cancel import Cancel
from lisa.core.transitions.restore import Place, Restore, Restored, RestoreItem
from lisa.pipeline.jobs.placing import judge
from lisa.pipeline.jobs.server import now_ms
from lisa.pipeline.jobs.standing import by_topic, inspected, known, portions
from lisa.pipeline.source.read_columns import arrow_schema

if TYPE_CHECKING:
    from lisa.core.transitions.inspect import Inspection
    from lisa.pipeline.jobs.server import Server

Mapped = Callable[[Iterator[Any]], Iterator[Any]]
"""Record batches -> record batches; called once for each task (see `DataFrame.mapInArrow`)."""

__all__ = ["LIST_SCHEMA", "PLAN_SCHEMA", "cancelling", "planning", "restoring", "reviving"]

LIST_SCHEMA = StructType(
    [
        StructField("topic", StringType(), nullable=False),
        StructField("id", StringType(), nullable=False),
        StructField("token", StringType()),
        StructField("outcome", StringType(), nullable=False),
        StructField("reason", StringType()),
        StructField("due_ms", LongType()),
        StructField("attempts", IntegerType()),
    ]
)
"""One line of the lists that a restore leaves behind."""

PLACE_SCHEMA = StructType(
    [
        StructField("group", StringType(), nullable=False),
        StructField("kind", StringType(), nullable=False),
        StructField("score_ms", LongType(), nullable=False),
        StructField("attempts", IntegerType(), nullable=False),
    ]
)

PLAN_SCHEMA = StructType(
    [
        *LIST_SCHEMA.fields,
        StructField("envelope", BinaryType()),
        StructField("expires_ms", LongType()),
        StructField("policy", StringType()),
        StructField("why", StringType()),
        StructField("places", ArrayType(PLACE_SCHEMA)),
    ]
)
"""The same with all that is needed to put the message back; null where it is not to be."""

Row = dict[str, Any]


def planning(
    server: Server, groups: Mapping[str, Sequence[str]], shards: Mapping[str, Sequence[int]],
    now_ms: int, *, expire: bool,
) -> Mapped:  # fmt: skip
    """Unsettled messages -> rows of PLAN_SCHEMA; changes nothing.

    groups, shards: by topic, its groups, and the numbers of shards that it has had.
    """

    def plan(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with server.open() as store:
            for batch in batches:
                for topic, rows in by_topic(batch.to_pylist(), _topic).items():
                    planned = [
                        _planned(row, groups.get(topic, ()), now_ms, expire=expire) for row in rows
                    ]
                    missing = [row for row in planned if row["outcome"] == "missing"]
                    _ask(store, topic, missing, shards.get(topic, ()))
                    yield _batch(planned, PLAN_SCHEMA)

    return plan


def _planned(row: Row, groups: Sequence[str], now_ms: int, *, expire: bool) -> Row:
    verdict = judge(row, groups, now_ms, expire=expire)
    planned = _listed(row, verdict.outcome, verdict.reason or None)
    item = verdict.item
    if item is not None:
        planned |= {
            "due_ms": item.due_ms, "envelope": item.envelope, "expires_ms": item.expires_ms,
            "policy": item.policy, "why": item.reason,
            "places": [place._asdict() for place in item.places],
        }  # fmt: skip
    return planned


def _ask(store: SyncStore, topic: str, rows: Sequence[Row], counts: Sequence[int]) -> None:
    """Correct the outcome of what the server knows after all."""
    try:
        found = store.drive(known(store, topic, [row["id"] for row in rows], counts))
    except InvalidMessage as error:  # a topic that no server of ours can hold
        for row in rows:
            row["outcome"], row["reason"] = "unrestorable", str(error)
        return
    for row in rows:
        seen = found.get(row["id"])
        if seen is not None:
            row["outcome"], row["reason"] = _standing(row["token"], seen)


def _standing(token: str | None, seen: Inspection) -> tuple[str, str | None]:
    if seen.envelope:
        same = fence_of(seen.envelope)[:8] == token
        return "live", None if same else "its id was sent again"
    stone = seen.tombstone
    return "settled", f"tombstone: {stone.state}" if stone else None


def restoring(server: Server, begun_ms: int) -> Mapped:
    """Rows of PLAN_SCHEMA that the server does not know -> rows of LIST_SCHEMA.

    begun_ms: when the first of these was begun, by the server's clock. A task that Spark repeats
    later than tombstones last raises LisaError: what its first attempt put back may have been
    handled and forgotten, which only the journal knows, and a new run reads.
    """

    def restore(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with server.open() as store:
            for batch in batches:
                for topic, rows in by_topic(batch.to_pylist(), _topic).items():
                    store.drive(store.groups(topic))
                    most = store.batch_size(topic, Restore)
                    for some in portions(rows, most, lambda row: len(row["envelope"])):
                        if _attempt() > 0:
                            _check_memory(store, topic, begun_ms)
                        yield _batch(_restored(store, topic, some), LIST_SCHEMA)

    return restore


def _attempt() -> int:
    context = TaskContext.get()
    return 0 if context is None else context.attemptNumber()


def _check_memory(store: SyncStore, topic: str, begun_ms: int) -> None:
    """Refuse to repeat what the server may have forgotten."""
    memory_ms = duration_ms(store.drive(store.options(topic)).retention)
    if store.drive(now_ms(store)) >= begun_ms + memory_ms:
        raise LisaError(
            f"a task of this restore failed, and Spark repeats it later than topic {topic!r} "
            "remembers what was settled (its option retention); run restore again: it finds what "
            "was put back, and nothing comes twice"
        )


def _restored(store: SyncStore, topic: str, rows: list[Row]) -> list[Row]:
    try:
        said = store.call_by_id(Restore(topic, [_item(row) for row in rows]))
    except GroupRemoved as error:
        if len(rows) == 1:
            return [_listed(rows[0], "unrestorable", str(error))]
        # Some of them were owed by a group that an operator has just taken away.
        return [one for row in rows for one in _restored(store, topic, [row])]
    live = [row for row, answer in zip(rows, said, strict=True) if answer is Restored.LIVE]
    seen = store.drive(inspected(store, topic, [row["id"] for row in live]))
    standing = {row["id"]: one for row, one in zip(live, seen, strict=True)}
    return [
        _answered(row, answer, standing.get(row["id"]))
        for row, answer in zip(rows, said, strict=True)
    ]


def _answered(row: Row, answer: Restored, seen: Inspection | None) -> Row:
    """What became of a message that the server did not know when the job planned."""
    if answer is Restored.SETTLED:
        return _listed(row, "settled", "settled while the job ran")
    if seen is not None and seen.envelope and not _is_same(row, seen):
        return _listed(row, "live", "its id was sent again while the job ran")
    # Live with its own token: this job put it back, in an attempt of this task that died or by a
    # call whose reply was lost.
    return _listed(row, "restored", None)


def _item(row: Row) -> RestoreItem:
    places = tuple(Place(**place) for place in row["places"])
    return RestoreItem(
        row["id"], row["envelope"], row["due_ms"], row["expires_ms"], row["policy"], places,
        row["why"] or "",
    )  # fmt: skip


def reviving(server: Server) -> Mapped:
    """Lives that ended (rows with topic, id, token, state) -> those live here, as LIST_SCHEMA."""

    def revive(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with server.open() as store:
            for batch in batches:
                for topic, rows in by_topic(batch.to_pylist(), _topic).items():
                    seen = store.drive(inspected(store, topic, [row["id"] for row in rows]))
                    yield _batch(
                        [
                            _listed(row, "revived", f"archived as {row['state']}")
                            for row, one in zip(rows, seen, strict=True)
                            if _is_same(row, one)
                        ],
                        LIST_SCHEMA,
                    )

    return revive


def cancelling(server: Server) -> Mapped:
    """Revived messages (LIST_SCHEMA) -> the same with what a cancel answered in `reason`.

    Looked at once more before: an id that was sent anew meanwhile is another message.
    """

    def cancel(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with server.open() as store:
            for batch in batches:
                for topic, rows in by_topic(batch.to_pylist(), _topic).items():
                    store.drive(store.groups(topic))
                    for some in portions(rows, store.batch_size(topic, Cancel), lambda _: 0):
                        yield _batch(_cancelled(store, topic, some), LIST_SCHEMA)

    return cancel


def _cancelled(store: SyncStore, topic: str, rows: list[Row]) -> list[Row]:
    seen = store.drive(inspected(store, topic, [row["id"] for row in rows]))
    same = [row for row, one in zip(rows, seen, strict=True) if _is_same(row, one)]
    answers = store.call_by_id(Cancel(topic, [row["id"] for row in same])) if same else []
    said = {row["id"]: answer for row, answer in zip(same, answers, strict=True)}
    return [row | {"reason": f"{row['reason']}; now {said.get(row['id'], 'gone')}"} for row in rows]


def _is_same(row: Row, seen: Inspection) -> bool:
    return bool(seen.envelope) and fence_of(seen.envelope)[:8] == row["token"]


def _topic(row: Row) -> str:
    return str(row["topic"])


def _listed(row: Row, outcome: str, reason: str | None) -> Row:
    kept = {name: row[name] for name in ("topic", "id", "token", "due_ms", "attempts")}
    return kept | {"outcome": outcome, "reason": reason}


def _batch(rows: Sequence[Row], schema: StructType) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=arrow_schema(schema))
