"""The job `restore`: restores unsettled messages to a Redis that came back empty or older.

It checks the journals, restores options and groups of topics, and lists each message with its
outcome. Spark's workers plan, ask the server, restore and cancel: `planning`, `restoring` and
`reviving` return their tasks, for `DataFrame.mapInArrow`. `judge` plans the restore of one message:
its envelope, and its state in each group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from lisa.admin.topics import counts as topic_counts
from lisa.core.model.clock import duration_ms
from lisa.core.model.envelope import Envelope, fence_of, join_envelope
from lisa.core.model.errors import ConfigError, GroupRemoved, InvalidMessage, LisaError
from lisa.core.model.keys import check_id
from lisa.core.model.sharding import Topic, count_of
from lisa.core.redis.flow import Flow
from lisa.core.store import group_removal, limits
from lisa.core.store.placing import note_restored
from lisa.core.store.replies import pairs
from lisa.core.store.reshard import spread
from lisa.core.store.store import Store, SyncStore, chunks, grouped, portions
from lisa.core.transitions.base import text
from lisa.core.transitions.change import Cancel
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.restore import Restore, Restored, RestoreItem, RestoreState
from lisa.core.transitions.topic import Configure
from lisa.pipeline.archive.base import selected
from lisa.pipeline.archive.fold import THROUGH
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.jobs.lists import OutputFolder
from lisa.pipeline.jobs.lookup import Mapped, Row, inspected, known, mapped_by_topic
from lisa.pipeline.jobs.message_history import (
    Remainder,
    find_remainders,
    fold_with_archive,
    latest_lives,
    merged,
    read_remainders,
    topics_in,
)
from lisa.pipeline.jobs.windows import Window, gap_windows
from lisa.pipeline.paths import literal
from lisa.pipeline.server import Server, check_layout, started_ms

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

    from lisa.core.transitions.inspect import Inspection
    from lisa.pipeline.archive import Archive

OUTCOMES = {
    "restored": "restored to its last state",
    "live": "already live on this server, not changed",
    "settled": "settled since, according to its tombstone or the journal",
    "expired": "past its ttl, not restored (use --expire)",
    "unrestorable": "cannot be restored; the list has the reason",
    "revived": "live on this server, but ended according to the archive",
}
"""Outcome of a message -> explanation."""

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


FIRST_LINES = 5
"""Number of rows of each list in the result; the directory has all rows."""


PLANNED = "missing"
"""Outcome used only in the plan: the message must be restored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restoration:
    """The result of a restore, or of a dry run.

    counts: number of messages by outcome (see OUTCOMES); in a dry run, `restored` counts messages
        that would be restored.
    by_topic: topic -> these counts.
    possibly_lost: windows in which messages may have been lost; empty without gaps in the journal.
    where: the directory with the exact lists.
    seconds: duration of the restore.
    first: outcome -> the first rows of its list.
    """

    dry_run: bool
    counts: Mapping[str, int]
    by_topic: Mapping[str, Mapping[str, int]]
    possibly_lost: Sequence[Window]
    where: str
    seconds: float
    first: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict, repr=False)


@unwrapped()
def restore(
    spark: SparkSession,
    archive: Archive,
    server: Server,
    to: str,
    *,
    topics: Sequence[str] | None = None,
    ids: Sequence[str] | None = None,
    expire: bool = False,
    settle_revived: bool = False,
    dry_run: bool = False,
    reopen: Callable[[], Archive] | None = None,
    stage: Callable[[str], None] = lambda _: None,
) -> Restoration:
    """Restore every archived message that was not settled.

    Restores id, due time, failed attempts, ttl, retry policy and send token. Messages that the
    server knows, live or by a tombstone, are not changed: restore is idempotent, and may run while
    managers, consumers and producers are running.

    to: a new directory for the lists: `lists` (Parquet), `csv`, `summary.json`.
    topics, ids: only these topics or ids; None means all.
    expire: also restore messages past their ttl, without that ttl.
    settle_revived: cancel messages that are live although they had ended.
    dry_run: only judge and list; do not change the server.
    reopen: opens the present version of the archive, if the archive may advance meanwhile.
    stage: called with a description of each stage.

    Raises ConfigError for invalid arguments, ServerUnavailable if the server does not answer, and
    LisaError if the journal is trimmed meanwhile; the restore may then be repeated.
    """
    began = time.monotonic()
    folder = OutputFolder(spark, to)
    stage("reading the archive's offsets")
    found = survey(server, archive, topics, dry_run=dry_run)
    stage("comparing the archive with the server")
    lists = RestoreLists(spark, archive, server, folder, found, ids=ids)
    lists.plan(expire=expire)
    stage("listing messages to restore" if dry_run else "restoring messages")
    parts = lists.parts(reopen or (lambda: archive), settle_revived=settle_revived, dry_run=dry_run)
    reduce(DataFrame.unionByName, parts).write.parquet(folder.path("lists"))
    folder.remove("work")
    stage("writing the lists")
    return _result(spark, folder, _windows(archive, found), began, dry_run=dry_run)


def _windows(archive: Archive, survey: Survey) -> list[Window]:
    """The windows in which messages may have been lost."""
    found = []
    for remainder in survey.remainders:
        after = remainder.archived_ms
        if not remainder.whole:
            ends = [survey.now if remainder.first_ms is None else remainder.first_ms]
            ends += [survey.started] if survey.started > (after or 0) else []
            reason = "between the last archived event and the server's return"
            until = max(min(ends), after or 0)
            found.append(Window(remainder.topic, after, until, reason, remainder.shard))
    names = {remainder.topic for remainder in survey.remainders}
    return found + [
        window for window in gap_windows(archive.gaps(), archive.log) if window.topic in names
    ]


def _result(
    spark: SparkSession, folder: OutputFolder, windows: list[Window], began: float, *, dry_run: bool
) -> Restoration:
    """Count the lists, write them as CSV, and write the summary."""
    rows = spark.read.schema(LIST_SCHEMA).parquet(literal(folder.path("lists")))
    folder.write_csv(rows.coalesce(1), "csv", by="outcome")
    counted = rows.groupBy("topic", "outcome").count().collect()
    counts = dict.fromkeys(OUTCOMES, 0)
    by_topic: dict[str, dict[str, int]] = {}
    for topic, outcome, number in counted:
        counts[outcome] += number
        by_topic.setdefault(topic, dict.fromkeys(OUTCOMES, 0))[outcome] = number
    first = {
        outcome: [
            row.asDict()
            for row in rows.where(sf.col("outcome") == outcome).limit(FIRST_LINES).collect()
        ]
        for outcome, number in counts.items()
        if number and outcome != "live"
    }
    result = Restoration(
        dry_run=dry_run,
        counts=counts,
        by_topic=by_topic,
        possibly_lost=windows,
        where=folder.where,
        seconds=round(time.monotonic() - began, 3),
        first=first,
    )
    summary = asdict(result)
    del summary["first"]
    folder.write_summary(summary)
    return result


class RestoreLists:
    """Compares the archive with the server; the plan and intermediate rows are kept in files.

    Raises LisaError if the journal was trimmed since the survey.
    """

    def __init__(
        self,
        spark: SparkSession,
        archive: Archive,
        server: Server,
        folder: OutputFolder,
        survey: Survey,
        *,
        ids: Sequence[str] | None,
    ) -> None:
        self._spark, self._server, self._folder = spark, server, folder
        self._survey, self._ids = survey, ids
        self._topics = sorted(survey.groups)
        # The events that are not archived yet are copied, because the journal may be trimmed.
        self._rest = read_remainders(spark, server, survey.remainders)
        self._fresh: DataFrame | None = None
        if self._rest is not None:
            self._rest = folder.work_copy(self._rest, "rest")
            self._fresh = folder.work_copy(fold_with_archive(archive, self._rest), "fresh")
        self._lives = selected(merged(archive, self._fresh), self._topics, ids)

    def plan(self, *, expire: bool) -> None:
        """Plan each unsettled message; written to files, because computing it is expensive."""
        survey = self._survey
        judging = planning(
            self._server,
            survey.groups,
            shard_counts(survey.remainders),
            survey.now,
            expire=expire,
        )
        rows = _unsettled(self._lives).mapInArrow(judging, PLAN_SCHEMA)
        self._plan = self._folder.work_copy(rows, "plan")

    def parts(
        self, reopen: Callable[[], Archive], *, settle_revived: bool, dry_run: bool
    ) -> list[DataFrame]:
        """The lists, rows of LIST_SCHEMA. Unless `dry_run`, writing them restores the messages.

        reopen: opens the present version of the archive.
        settle_revived: cancel messages that are live although they had ended.
        """
        missing = self._plan.where(sf.col("outcome") == PLANNED)
        parts = []
        ended = None if self._survey.is_empty else self._ended(reopen, missing)
        if ended is not None:
            same = [missing[name].eqNullSafe(ended[name]) for name in ("topic", "id", "token")]
            settled = missing.join(ended, same, "left_semi")
            parts.append(_with_outcome(settled, "settled", sf.lit("settled while the job ran")))
            missing = missing.join(ended, same, "left_anti")
        parts.append(_listing(self._plan.where(sf.col("outcome") != PLANNED)))
        if dry_run:
            parts.append(_listing(missing.withColumn("outcome", sf.lit("restored"))))
        else:
            with self._server.open() as store:
                begun = store.drive(store.server_time_ms())
            parts.append(missing.mapInArrow(restoring(self._server, begun), LIST_SCHEMA))
        if self._fresh is not None and self._rest is not None:
            parts.append(_settled_since(selected(self._fresh, self._topics, self._ids), self._rest))
        if not self._survey.is_empty:
            parts.append(self._revived(settle=settle_revived and not dry_run))
        return parts

    def _ended(self, reopen: Callable[[], Archive], missing: DataFrame) -> DataFrame | None:
        """The lives unknown to the server that ended since the journal was read.

        Planning may take longer than tombstones are kept: a message may have been handled, and its
        tombstone may have expired, before the server was asked. The journal, read again, shows its
        end.
        """
        known = latest_lives(self._spark, reopen, self._server, missing.select("topic", "id"))
        if known is None:
            return None
        ended = known.where("settled").select("topic", "id", "token")
        return self._folder.work_copy(ended, "ended")

    def _revived(self, *, settle: bool) -> DataFrame:
        """Messages that are live on the server although their life has ended."""
        live = self._spark.read.format("lisa").options(**self._server.as_options())
        live = live.option("topic", ",".join(self._topics))
        here = live.schema("topic string, id string").load().distinct()
        ended = self._lives.where("settled").select(
            "topic", "id", "token", "state", "attempts", sf.unix_millis("due").alias("due_ms")
        )
        found = ended.join(here, ["topic", "id"], "left_semi")
        return found.mapInArrow(reviving(self._server, settle=settle), LIST_SCHEMA)


def _unsettled(lives: DataFrame) -> DataFrame:
    """The input of the plan."""
    groups = sf.transform(
        "groups",
        lambda one: sf.struct(
            one["group"].alias("group"),
            one["state"].alias("state"),
            one["attempts"].alias("attempts"),
            one["reason"].alias("reason"),
            sf.unix_millis(one["due"]).alias("due_ms"),
            sf.unix_millis(one["at"]).alias("at_ms"),
        ),
    )
    return lives.where(~sf.col("settled")).select(
        "topic",
        "id",
        "token",
        "state",
        "policy",
        "attempts",
        "kind",
        "headers",
        "body",
        sf.unix_millis("due").alias("due_ms"),
        sf.unix_millis("expires").alias("expires_ms"),
        groups.alias("groups"),
    )


def _settled_since(fresh: DataFrame, rest: DataFrame) -> DataFrame:
    """The messages settled by an event that is not archived yet; fresh: their folded rows."""
    ends = rest.where("settled").select("topic", "id", sf.col("at").alias("settled_at"))
    ended = fresh.where("settled").join(ends, ["topic", "id", "settled_at"], "left_semi")
    ended = ended.withColumn("due_ms", sf.unix_millis("due"))
    return _with_outcome(ended, "settled", sf.concat(sf.lit("journal: "), "state"))


def _with_outcome(rows: DataFrame, outcome: str, reason: Column) -> DataFrame:
    return _listing(rows.withColumn("outcome", sf.lit(outcome)).withColumn("reason", reason))


def _listing(rows: DataFrame) -> DataFrame:
    return rows.select(*LIST_SCHEMA.names)


class Survey(NamedTuple):
    """The state of the server before a restore.

    now, started: the server's clock, and when its process started, in epoch ms.
    is_empty: whether none of the archive's topics has live messages.
    remainders: of all journals. groups: topic -> its groups, including restored ones.
    """

    now: int
    started: int
    is_empty: bool
    remainders: Sequence[Remainder]
    groups: Mapping[str, tuple[str, ...]]


def survey(
    server: Server, archive: Archive, topics: Sequence[str] | None, *, dry_run: bool
) -> Survey:
    """Read the state of the server; unless `dry_run`, prepare its topics."""
    with server.open() as store:
        store.drive(check_layout(store) if dry_run else store.check_schema())
        now = store.drive(store.server_time_ms())
        started = store.drive(started_ms(store))
        journals = {*archive.topics(), *archive.offsets()}
        is_empty = not any(store.drive(_has_live_messages(store, journal)) for journal in journals)
        return Survey(now, started, is_empty, *prepare(store, archive, topics, dry_run=dry_run))


def prepare(
    store: SyncStore, archive: Archive, topics: Sequence[str] | None, *, dry_run: bool
) -> tuple[list[Remainder], dict[str, tuple[str, ...]]]:
    """The remainders of all journals, and topic -> its groups, including restored ones.

    Restores missing groups and options of a topic that came back empty or older, or that has lost
    its shard layout.
    """
    records = archive.topics()
    names = topics_in(archive, topics)
    remainders, groups = store.drive(find_remainders(store, archive, names)), {}
    journals = grouped((remainder.topic, remainder) for remainder in remainders)
    for topic in names:
        seen = journals[topic]
        layout = store.drive(store.layout(Topic(topic)))
        for remainder in seen:
            if remainder.whole and remainder.journal in layout.active(Topic(topic)):
                store.drive(_check_journal(store, remainder))
        here = store.drive(store.groups(topic))
        scattered = not layout.number and any(remainder.shard for remainder in seen)
        is_whole = all(remainder.whole for remainder in seen) and not scattered
        lost = None if is_whole else records.get(topic)
        wanted = lost.groups if lost else ()
        if not dry_run:
            lacking = [name for name in wanted if name not in here]
            store.drive(rebuild(store, topic, lacking, lost.options if lost else {}))
        groups[topic] = tuple(sorted({*here, *wanted}))
    return remainders, groups


def _has_live_messages(store: Store, topic: str) -> Flow[bool]:
    """Whether a topic, or one of its shards, has live messages."""
    (counts,) = yield from topic_counts(store, [topic])
    return counts.waiting > 0 or any(
        group.ready or group.in_flight or group.parked or group.retry or group.garbage
        for group in counts.groups
    )


def _check_journal(store: Store, remainder: Remainder) -> Flow[None]:
    """Raises ConfigError if a topic was not lost, but its journal has been turned off."""
    keeps = yield from store.command("HGET", store.keys.topic(remainder.journal).options, "journal")
    if keeps != b"1":
        raise ConfigError(
            f"topic {remainder.topic!r} was not lost, but its journal is off: messages settled "
            "since then are unknown and would be delivered again; select other topics with --topic"
        )


def rebuild(
    store: Store, topic: str, groups: Iterable[str], options: Mapping[str, str]
) -> Flow[None]:
    """Register a topic, and restore missing options, limits of keys and groups on all shards.

    Does not restore a pause, or the marker of a pending group removal, which old archives contain.
    """
    yield from store.register([topic])
    reply = yield from store.command("HGETALL", store.keys.topic(topic).options)
    there = {text(name) for name in pairs(reply)}
    lacking = {
        name: value
        for name, value in options.items()
        if name != "paused"
        and not group_removal.is_mark(name)
        and not name.startswith(limits.ARCHIVED)
        and name not in there
    }
    if lacking:
        yield from store.run(Configure(topic, lacking))
    for group in groups:
        yield from store.run(Declare(topic, group, unlimited=True))
    yield from limits.restore(store, Topic(topic), options)
    yield from spread(store, Topic(topic))


def shard_counts(remainders: Sequence[Remainder]) -> dict[str, list[int]]:
    """Topic -> the shard counts that it is known to have had."""
    counts = grouped(
        (remainder.topic, count_of(remainder.journal))
        for remainder in remainders
        if remainder.shard
    )
    return {topic: sorted(set(own)) for topic, own in counts.items()}


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
        for part in portions(rows, most, lambda row: len(row["envelope"])):
            if _attempt() > 0:
                _check_memory(store, topic, begun_ms)
            yield _restored(store, topic, part)

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
        for part in chunks(rows, store.batch_size(topic, Cancel)):
            seen = store.drive(inspected(store, topic, [row["id"] for row in part]))
            live = [row for row, one in zip(part, seen, strict=True) if _is_same(row, one)]
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
