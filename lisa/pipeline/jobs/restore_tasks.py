"""The tasks of a restore on Spark's workers: plan, query the server, restore, cancel.

`planning`, `restoring` and `reviving` return a task for `DataFrame.mapInArrow`; `judge` plans the
restore of one message: its envelope, and its state in each group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
from lisa.core.model.envelope import Envelope, fence_of, join_envelope
from lisa.core.model.errors import GroupRemoved, InvalidMessage, LisaError
from lisa.core.model.keys import check_id
from lisa.core.store.placing import note_restored
from lisa.core.store.store import SyncStore, chunks, portions
from lisa.core.transitions.change import Cancel
from lisa.core.transitions.restore import Restore, Restored, RestoreItem, RestoreState
from lisa.pipeline.archive.fold import THROUGH
from lisa.pipeline.jobs.lookup import Mapped, Row, inspected, known, mapped_by_topic

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
        return [outcome for row in rows for outcome in _restored(store, topic, [row])]
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


def reviving(server: Server, *, settle: bool) -> Mapped:
    """Ended lives (rows with topic, id, token, state) -> those live on the server, LIST_SCHEMA.

    settle: cancel them; `reason` then has the answer, too.
    """

    def revive(store: SyncStore, topic: str, rows: list[Row]) -> Iterator[list[Row]]:
        store.drive(store.groups(topic))
        for some in chunks(rows, store.batch_size(topic, Cancel)):
            seen = store.drive(inspected(store, topic, [row["id"] for row in some]))
            live = [row for row, one in zip(some, seen, strict=True) if _is_same(row, one)]
            reasons = [f"archived as {row['state']}" for row in live]
            if settle and live:
                said = store.call_by_id(Cancel(topic, [row["id"] for row in live]))
                reasons = [f"{why}; now {now}" for why, now in zip(reasons, said, strict=True)]
            yield [_listed(row, "revived", why) for row, why in zip(live, reasons, strict=True)]

    return mapped_by_topic(server, LIST_SCHEMA, revive)


def _is_same(row: Row, seen: Inspection) -> bool:
    return bool(seen.envelope) and fence_of(seen.envelope)[:8] == row["token"]


def _listed(row: Row, outcome: str, reason: str | None) -> Row:
    kept = {name: row[name] for name in ("topic", "id", "token", "due_ms", "attempts")}
    return kept | {"outcome": outcome, "reason": reason}


class RestoreVerdict(NamedTuple):
    """Whether and how a message can be restored.

    outcome: missing, expired or unrestorable; `missing` means restore it unless the server has it.
    reason: why it cannot be restored. item: the arguments of the restore.
    """

    outcome: str
    reason: str
    item: RestoreItem | None = None


def judge(
    row: Mapping[str, Any], groups: Sequence[str], now_ms: int, *, expire: bool = False
) -> RestoreVerdict:
    """Plan the restore of one unsettled row of MESSAGES_SCHEMA.

    row: with times in epoch ms as `due_ms` and `expires_ms`; `groups` is a list of mappings with
        group, state, attempts, due_ms, at_ms and reason; headers is a mapping or None.
    groups: the groups that are declared, or will be.
    expire: also restore a message past its ttl; without that ttl, or it would expire immediately.
    """
    if row["body"] is None or (row["token"] is None and row["kind"] is not None):
        return RestoreVerdict("unrestorable", "its envelope was never archived")
    try:
        check_id(row["id"])
    except InvalidMessage as error:
        return RestoreVerdict("unrestorable", str(error))
    found = row["groups"] or ()
    through = {group["group"] for group in found if group["state"] in THROUGH}
    due_ms = row["due_ms"]
    if due_ms is None:
        due_ms = now_ms
    states = _group_states(row, found, through, groups, due_ms)
    if states is None:
        return RestoreVerdict("unrestorable", "the groups that have not settled it no longer exist")
    # The ttl does not apply to garbage, which is kept for inspection.
    dead = bool(states) and all(state.kind == "garbage" for state in states)
    expires_ms = None if dead else row["expires_ms"]
    if expires_ms is not None and expires_ms <= now_ms:
        if not expire:
            return RestoreVerdict("expired", "past its ttl")
        expires_ms = None
    try:
        envelope = _envelope(row, "+" if through else "-")
    except InvalidMessage as error:
        return RestoreVerdict("unrestorable", str(error))
    why = next((group["reason"] for group in found if group["reason"] and _has_failed(group)), None)
    return RestoreVerdict(
        "missing",
        "",
        RestoreItem(row["id"], envelope, due_ms, expires_ms, row["policy"], states, why or ""),
    )


def _has_failed(one: Mapping[str, Any]) -> bool:
    """Whether a group's reason is that of a failure; late policies count no attempt."""
    return bool(one["attempts"]) or one["state"] == "garbage"


def _envelope(row: Mapping[str, Any], mark: str) -> bytes:
    if row["kind"] is None:  # unknown version: keep the envelope; consumers report it
        return bytes(row["body"])
    headers = dict(row["headers"] or ())
    return join_envelope(Envelope(row["token"], mark, row["kind"], headers, row["body"]))


def _group_states(
    row: Mapping[str, Any],
    found: Sequence[Mapping[str, Any]],
    through: set[str],
    declared: Sequence[str],
    due_ms: int,
) -> tuple[RestoreState, ...] | None:
    """The state in each group; () means waiting, None that no owing group is declared."""
    failed = {group["group"]: group["attempts"] for group in found if group["attempts"]}
    if row["state"] == "waiting":
        if not failed:
            return ()
        # Rescheduled after a failure: the waiting set stores no attempts, the retry sets do.
        owing = [name for name in declared if name not in through]
        return tuple(RestoreState(name, "retry", due_ms, failed.get(name, 0)) for name in owing)
    states = []
    owed = [group for group in found if group["group"] not in through]
    for group in owed:
        if group["group"] not in declared:
            continue
        if group["state"] == "garbage":
            states.append(
                RestoreState(group["group"], "garbage", group["at_ms"], group["attempts"])
            )
        else:
            due = group["due_ms"] if group["due_ms"] is not None else due_ms
            states.append(RestoreState(group["group"], "retry", due, group["attempts"]))
    if states:
        return tuple(states)
    if owed:
        return None
    # All archived groups have settled the message, but it has not ended: an event is missing, and
    # another group still needs the message. Delivering it twice is better than losing it.
    missing = [name for name in declared if name not in through]
    return tuple(RestoreState(name, "retry", due_ms) for name in missing)
