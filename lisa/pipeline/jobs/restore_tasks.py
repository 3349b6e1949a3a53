"""The tasks of a restore on Spark's workers: plan, query the server, restore, cancel.

Each public function returns a task for `DataFrame.mapInArrow`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

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

from lisa.core.model.clock import duration_ms
from lisa.core.model.envelope import fence_of
from lisa.core.model.errors import GroupRemoved, InvalidMessage, LisaError
from lisa.core.store.placing import note_restored
from lisa.core.store.store import SyncStore, chunks, portions
from lisa.core.transitions.change import Cancel
from lisa.core.transitions.restore import Restore, Restored, RestoreItem, RestoreState
from lisa.pipeline.jobs.lookup import Mapped, Row, inspected, known, mapped_by_topic
from lisa.pipeline.jobs.restore_plan import judge

if TYPE_CHECKING:
    from lisa.core.transitions.inspect import Inspection
    from lisa.pipeline.server import Server

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
"""One row of a restore's lists."""

GROUP_STATE_SCHEMA = StructType(
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
        StructField("group_states", ArrayType(GROUP_STATE_SCHEMA)),
    ]
)
"""LIST_SCHEMA plus the arguments of the restore; null if the message is not restored."""


def planning(
    server: Server,
    groups: Mapping[str, Sequence[str]],
    shards: Mapping[str, Sequence[int]],
    now_ms: int,
    *,
    expire: bool,
) -> Mapped:
    """Unsettled messages -> rows of PLAN_SCHEMA; changes nothing.

    groups: topic -> its groups. shards: topic -> its present and former shard counts.
    """

    def plan(store: SyncStore, topic: str, rows: list[Row]) -> Iterator[list[Row]]:
        planned = [_planned(row, groups.get(topic, ()), now_ms, expire=expire) for row in rows]
        _ask(store, topic, planned, shards.get(topic, ()))
        yield planned

    return mapped_by_topic(server, PLAN_SCHEMA, plan)


def _planned(row: Row, groups: Sequence[str], now_ms: int, *, expire: bool) -> Row:
    verdict = judge(row, groups, now_ms, expire=expire)
    planned = _listed(row, verdict.outcome, verdict.reason or None)
    item = verdict.item
    if item is not None:
        planned |= {
            "due_ms": item.due_ms,
            "envelope": item.envelope,
            "expires_ms": item.expires_ms,
            "policy": item.policy,
            "why": item.reason,
            "group_states": [entry._asdict() for entry in item.group_states],
        }
    return planned


def _ask(store: SyncStore, topic: str, rows: Sequence[Row], counts: Sequence[int]) -> None:
    """Correct the outcome of messages that the server knows."""
    try:
        found = store.drive(known(store, topic, [row["id"] for row in rows], counts))
    except InvalidMessage as error:  # the topic's name is not valid
        for row in rows:
            row["outcome"], row["reason"] = "unrestorable", str(error)
        return
    for row in rows:
        seen = found.get(row["id"])
        if seen is not None:
            row["outcome"], row["reason"] = _standing(row["token"], seen)


def _standing(token: str | None, seen: Inspection) -> tuple[str, str | None]:
    if seen.envelope:
        # The token of a message is unknown if its send was not archived.
        same = token in (None, fence_of(seen.envelope)[:8])
        return "live", None if same else "its id was sent again"
    stone = seen.tombstone
    return "settled", f"tombstone: {stone.state}" if stone else None


def restoring(server: Server, begun_ms: int) -> Mapped:
    """Restore messages that the server does not know: PLAN_SCHEMA -> LIST_SCHEMA.

    begun_ms: start of the restore by the server's clock. If Spark repeats a task after tombstones
        have expired, the task raises LisaError: messages restored by its first attempt may have
        been handled and forgotten. A new run finds this in the journal.
    """

    def restore(store: SyncStore, topic: str, rows: list[Row]) -> Iterator[list[Row]]:
        store.drive(store.groups(topic))
        most = store.batch_size(topic, Restore)
        for some in portions(rows, most, lambda row: len(row["envelope"])):
            if _attempt() > 0:
                _check_memory(store, topic, begun_ms)
            yield _restored(store, topic, some)

    return mapped_by_topic(server, LIST_SCHEMA, restore)


def _attempt() -> int:
    context = TaskContext.get()
    return 0 if context is None else context.attemptNumber()


def _check_memory(store: SyncStore, topic: str, begun_ms: int) -> None:
    """Raises LisaError if tombstones of restored messages may have expired."""
    memory_ms = duration_ms(store.drive(store.options(topic)).retention)
    if store.drive(store.server_time_ms()) >= begun_ms + memory_ms:
        raise LisaError(
            f"a task of this restore failed, and Spark repeats it after tombstones of topic "
            f"{topic!r} have expired (option retention); run restore again: it finds the messages "
            "already restored, and restores none twice"
        )


def _restored(store: SyncStore, topic: str, rows: list[Row]) -> list[Row]:
    items = [_item(row) for row in rows]
    store.drive(note_restored(store, topic, items))
    try:
        said = store.call_by_id(Restore(topic, items))
    except GroupRemoved as error:
        if len(rows) == 1:
            return [_listed(rows[0], "unrestorable", str(error))]
        # A group of some of these messages was removed meanwhile: restore them one by one.
        return [one for row in rows for one in _restored(store, topic, [row])]
    live = [row for row, answer in zip(rows, said, strict=True) if answer is Restored.LIVE]
    seen = store.drive(inspected(store, topic, [row["id"] for row in live]))
    standing = {row["id"]: one for row, one in zip(live, seen, strict=True)}
    return [
        _answered(row, answer, standing.get(row["id"]))
        for row, answer in zip(rows, said, strict=True)
    ]


def _answered(row: Row, answer: Restored, seen: Inspection | None) -> Row:
    """The outcome of a message that the server did not know when the plan was made."""
    if answer is Restored.SETTLED:
        return _listed(row, "settled", "settled while the job ran")
    if seen is not None and seen.envelope and not _is_same(row, seen):
        return _listed(row, "live", "its id was sent again while the job ran")
    # Live with its own token: this job restored it, in an earlier attempt of this task or in a call
    # whose reply was lost.
    return _listed(row, "restored", None)


def _item(row: Row) -> RestoreItem:
    group_states = tuple(RestoreState(**entry) for entry in row["group_states"])
    return RestoreItem(
        row["id"],
        row["envelope"],
        row["due_ms"],
        row["expires_ms"],
        row["policy"],
        group_states,
        row["why"] or "",
    )


def reviving(server: Server) -> Mapped:
    """Ended lives (rows with topic, id, token, state) -> those live on the server, LIST_SCHEMA."""

    def revive(store: SyncStore, topic: str, rows: list[Row]) -> Iterator[list[Row]]:
        seen = store.drive(inspected(store, topic, [row["id"] for row in rows]))
        yield [
            _listed(row, "revived", f"archived as {row['state']}")
            for row, one in zip(rows, seen, strict=True)
            if _is_same(row, one)
        ]

    return mapped_by_topic(server, LIST_SCHEMA, revive)


def cancelling(server: Server) -> Mapped:
    """Cancel revived messages (LIST_SCHEMA); adds the answer of the cancel to `reason`.

    Skips ids that were sent again meanwhile, because they are other messages.
    """

    def cancel(store: SyncStore, topic: str, rows: list[Row]) -> Iterator[list[Row]]:
        store.drive(store.groups(topic))
        for some in chunks(rows, store.batch_size(topic, Cancel)):
            yield _cancelled(store, topic, some)

    return mapped_by_topic(server, LIST_SCHEMA, cancel)


def _cancelled(store: SyncStore, topic: str, rows: Sequence[Row]) -> list[Row]:
    seen = store.drive(inspected(store, topic, [row["id"] for row in rows]))
    same = [row for row, one in zip(rows, seen, strict=True) if _is_same(row, one)]
    answers = store.call_by_id(Cancel(topic, [row["id"] for row in same])) if same else []
    said = {row["id"]: answer for row, answer in zip(same, answers, strict=True)}
    return [row | {"reason": f"{row['reason']}; now {said.get(row['id'], 'gone')}"} for row in rows]


def _is_same(row: Row, seen: Inspection) -> bool:
    return bool(seen.envelope) and fence_of(seen.envelope)[:8] == row["token"]


def _listed(row: Row, outcome: str, reason: str | None) -> Row:
    kept = {name: row[name] for name in ("topic", "id", "token", "due_ms", "attempts")}
    return kept | {"outcome": outcome, "reason": reason}
