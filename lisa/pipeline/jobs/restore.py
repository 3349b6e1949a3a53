"""The job `restore`: Redis came back empty or older; put back what was not settled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from lisa.admin.reading import entry_number
from lisa.admin.topics import counts as topic_counts
from lisa.core import removal
from lisa.core.clock import datetime_ms
from lisa.core.errors import ConfigError
from lisa.core.flow import Flow
from lisa.core.shards import bases, count_of
from lisa.core.spread import spread
from lisa.core.store import Store, SyncStore, pairs
from lisa.core.transitions.base import text
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.declare import Declare
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.jobs import remaining
from lisa.pipeline.jobs.lists import Folder
from lisa.pipeline.jobs.lives import brought_up_to_date, by_now, chosen, folded
from lisa.pipeline.jobs.putting_back import (
    LIST_SCHEMA,
    PLAN_SCHEMA,
    Mapped,
    cancelling,
    planning,
    restoring,
    reviving,
)
from lisa.pipeline.jobs.remaining import Remainder
from lisa.pipeline.jobs.server import Server, check_layout, now_ms, started_ms
from lisa.pipeline.jobs.standing import by_topic

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

    from lisa.pipeline.archive import Archive

__all__ = ["OUTCOMES", "Restoration", "Window", "restore"]

OUTCOMES = {
    "restored": "put back as it stood",
    "live": "already live here, left alone",
    "settled": "settled meanwhile: its tombstone or the journal says so",
    "expired": "past its ttl, not put back (--expire does)",
    "unrestorable": "not to be rebuilt; the list says why",
    "revived": "live on this server although the archive saw it end",
}
"""What may become of a message, and what that means."""

PLANNED = "missing"
"""An outcome of the plan only: to be put back."""


@dataclass(frozen=True, slots=True)
class Window:
    """A time in which a topic may have accepted messages that no archive and no server knows.

    Epoch ms. `after_ms` is the last event known before it (None: none is known), `until_ms` its
    end; `reason` says what lies between. `shard` is that whose journal does not tell, None for the
    topic's own.
    """

    topic: str
    after_ms: int | None
    until_ms: int
    reason: str
    shard: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Restoration:
    """What a restore did, or would do.

    counts: messages by outcome, a key of OUTCOMES; in a dry run `restored` are those that would be.
    by_topic: the same for each topic.
    possibly_lost: the windows; there are none where the journal goes on without a gap.
    where: the directory with the exact lists.
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
    """Put back every message that the archive knows and that was not settled.

    With its id, due time, failed attempts, ttl, policy and send token. What the server knows,
    live or by its tombstone, is left alone, so it may be repeated, and run beside all roles.

    to: a new directory for the lists: `lists` (Parquet), `csv`, `summary.json`.
    topics, ids: only these; None is all.
    expire: put back what is past its ttl, too, without that ttl.
    settle_revived: cancel what is live again although it had ended.
    dry_run: judge and list only; the server is not changed.
    reopen: gives the archive as it is at that moment, where one is written meanwhile.
    stage: told what is being done.

    Raises ConfigError, and ServerUnavailable; a run that ended so may be repeated.
    """
    began = time.monotonic()
    folder = Folder(spark, to)
    stage("reading how far the archive has come")
    with server.open() as store:
        store.drive(check_layout(store) if dry_run else store.check_schema())
        now = store.drive(now_ms(store))
        started = store.drive(started_ms(store))
        places = {*archive.topics(), *archive.offsets()}
        is_empty = not any(store.drive(_live(store, place)) for place in places)
        remainders, groups = _prepare(store, archive, topics, dry_run=dry_run)
    names = sorted(groups)
    windows = _windows(archive, remainders, started, now)

    stage("judging what the archive knows")
    rest = _kept(spark, server, remainders, folder)
    fresh = None if rest is None else _written(folded(archive, rest), folder, "fresh")
    lives = chosen(brought_up_to_date(archive, fresh), names, ids)
    judging = planning(server, groups, _shards(remainders), now, expire=expire)
    plan = _plan(lives, judging, folder)

    stage("listing what would be put back" if dry_run else "putting messages back")
    missing = plan.where(sf.col("outcome") == PLANNED)
    parts = []
    if not is_empty:
        ended = _ended(spark, reopen or (lambda: archive), server, missing, folder)
        if ended is not None:
            parts.append(_listing(
                missing.join(ended, _same(missing, ended), "left_semi")
                .withColumn("outcome", sf.lit("settled"))
                .withColumn("reason", sf.lit("settled while the job ran"))
            ))  # fmt: skip
            missing = missing.join(ended, _same(missing, ended), "left_anti")
    with server.open() as store:
        begun = store.drive(now_ms(store))
    parts += [
        _listing(plan.where(sf.col("outcome") != PLANNED)),
        _listing(missing.withColumn("outcome", sf.lit("restored"))) if dry_run
        else missing.mapInArrow(restoring(server, begun), LIST_SCHEMA),
    ]  # fmt: skip
    if rest is not None and fresh is not None:
        parts.append(_settled_since(chosen(fresh, names, ids), rest))
    if not is_empty:
        settle = settle_revived and not dry_run
        parts.append(_revived(spark, lives, server, names, settle=settle))
    reduce(DataFrame.unionByName, parts).write.parquet(folder.path("lists"))
    folder.remove("work")

    stage("writing the lists")
    return _told(spark, folder, windows, began, dry_run=dry_run)


def _prepare(
    store: SyncStore, archive: Archive, topics: Sequence[str] | None, *, dry_run: bool
) -> tuple[list[Remainder], dict[str, tuple[str, ...]]]:
    """Where each topic's journals stand, and the groups that it has, or will have.

    A topic that came back empty or older gets back the groups and options that it lacks; so does
    one that no longer knows of its shards.
    """
    records = archive.topics()
    known = sorted({*records, *bases(archive.offsets())})
    unknown = sorted({*(topics or ())} - {*known})
    if unknown:
        raise ConfigError(
            f"the archive knows no topic {', '.join(unknown)}; "
            f"it holds {', '.join(known) or 'none'}"
        )
    names = sorted({*(topics or known)})
    remainders, groups = store.drive(remaining.look_at(store, archive, names)), {}
    journals = by_topic(remainders, lambda one: one.topic)
    for topic in names:
        seen = journals[topic]
        layout = store.drive(store.layout(topic))
        for one in seen:
            if one.whole and one.place in layout.places(topic):
                store.drive(_check_journal(store, one))
        here = store.drive(store.groups(topic))
        scattered = not layout.number and any(one.shard for one in seen)
        is_whole = all(one.whole for one in seen) and not scattered
        lost = None if is_whole else records.get(topic)
        wanted = lost.groups if lost else ()
        if not dry_run:
            lacking = [name for name in wanted if name not in here]
            store.drive(_rebuild(store, topic, lacking, lost.options if lost else {}))
        groups[topic] = tuple(sorted({*here, *wanted}))
    return remainders, groups


def _live(store: Store, topic: str) -> Flow[bool]:
    """Whether anything of a topic is live, or of one place."""
    (counts,) = yield from topic_counts(store, [topic])
    return counts.waiting > 0 or any(
        group.ready or group.in_flight or group.retry or group.garbage for group in counts.groups
    )


def _check_journal(store: Store, remainder: Remainder) -> Flow[None]:
    """Refuse a topic that is all there but has stopped its journal."""
    keeps = yield from store.command("HGET", store.keys.topic(remainder.place).options, "journal")
    if keeps != b"1":
        raise ConfigError(
            f"topic {remainder.topic!r} was not lost, and keeps no journal any more: what it "
            "settled since is not known, and would be sent again; name other topics by --topic"
        )


def _rebuild(
    store: Store, topic: str, groups: Iterable[str], options: Mapping[str, str]
) -> Flow[None]:
    """Give a topic its registration, and the options and groups that it lacks; all its shards, too.

    Never a pause, nor a removal that was under way: earlier archives hold its mark.
    """
    yield from store.register([topic])
    reply = yield from store.command("HGETALL", store.keys.topic(topic).options)
    there = {text(name) for name in pairs(reply)}
    lacking = {
        name: value for name, value in options.items()
        if name != "paused" and not removal.is_mark(name) and name not in there
    }  # fmt: skip
    if lacking:
        yield from store.run(Configure(topic, lacking))
    for group in groups:
        yield from store.run(Declare(topic, group))
    yield from spread(store, topic)


def _shards(remainders: Sequence[Remainder]) -> dict[str, list[int]]:
    """The numbers of shards that each topic is known to have had."""
    journals = by_topic([one for one in remainders if one.shard], lambda one: one.topic)
    return {topic: sorted({count_of(one.place) for one in own}) for topic, own in journals.items()}


def _plan(lives: DataFrame, judging: Mapped, folder: Folder) -> DataFrame:
    """Each unsettled message, judged; written down, for its reading is the costly part."""
    place = sf.transform(
        "groups",
        lambda one: sf.struct(
            one["group"].alias("group"), one["state"].alias("state"),
            one["attempts"].alias("attempts"), one["reason"].alias("reason"),
            sf.unix_millis(one["due"]).alias("due_ms"), sf.unix_millis(one["at"]).alias("at_ms"),
        ),
    )  # fmt: skip
    rows = lives.where(~sf.col("settled")).select(
        "topic", "id", "token", "state", "policy", "attempts", "kind", "headers", "body",
        sf.unix_millis("due").alias("due_ms"), sf.unix_millis("expires").alias("expires_ms"),
        place.alias("groups"),
    )  # fmt: skip
    planned = rows.mapInArrow(judging, PLAN_SCHEMA)
    return _written(planned, folder, "plan")


def _written(rows: DataFrame, folder: Folder, name: str) -> DataFrame:
    """The same rows, from files of their own."""
    where = folder.path("work", name)
    rows.write.parquet(where)
    return rows.sparkSession.read.schema(rows.schema).parquet(where)


def _kept(
    spark: SparkSession, server: Server, remainders: Sequence[Remainder], folder: Folder
) -> DataFrame | None:
    """The events behind the archive, written down once: the server's journal may be trimmed.

    Raises LisaError if it was, between the look at it and this.
    """
    rest = remaining.read(spark, server, remainders)
    return None if rest is None else _written(rest, folder, "rest")


def _ended(
    spark: SparkSession, reopen: Callable[[], Archive], server: Server, missing: DataFrame,
    folder: Folder,
) -> DataFrame | None:  # fmt: skip
    """Of the lives that the server did not know, those that ended since the journal was read.

    Judging takes longer than tombstones last: what was live at first may have been handled and
    forgotten before the server was asked. The journal, read behind that, knows.
    """
    known = by_now(spark, reopen, server, missing.select("topic", "id"))
    if known is None:
        return None
    return _written(known.where("settled").select("topic", "id", "token"), folder, "ended")


def _same(left: DataFrame, right: DataFrame) -> list[Column]:
    return [left[name].eqNullSafe(right[name]) for name in ("topic", "id", "token")]


def _settled_since(fresh: DataFrame, rest: DataFrame) -> DataFrame:
    """Of the messages folded anew, those that an event behind the archive has settled."""
    ends = rest.where("settled").select("topic", "id", sf.col("at").alias("settled_at"))
    ended = fresh.where("settled").join(ends, ["topic", "id", "settled_at"], "left_semi")
    return _listing(
        ended.withColumn("outcome", sf.lit("settled"))
        .withColumn("reason", sf.concat(sf.lit("journal: "), "state"))
        .withColumn("due_ms", sf.unix_millis("due"))
    )


def _revived(
    spark: SparkSession, lives: DataFrame, server: Server, topics: Sequence[str], *, settle: bool
) -> DataFrame:
    """What is live here although its life ended."""
    live = (
        spark.read.format("lisa").options(**server.as_options()).option("topic", ",".join(topics))
    )
    here = live.schema("topic string, id string").load().distinct()
    ended = lives.where("settled").select(
        "topic", "id", "token", "state", "attempts", sf.unix_millis("due").alias("due_ms")
    )  # fmt: skip
    found = ended.join(here, ["topic", "id"], "left_semi")
    revived = found.mapInArrow(reviving(server), LIST_SCHEMA)
    return revived.mapInArrow(cancelling(server), LIST_SCHEMA) if settle else revived


def _listing(rows: DataFrame) -> DataFrame:
    return rows.select(*LIST_SCHEMA.names)


def _windows(
    archive: Archive, remainders: Sequence[Remainder], started: int, now: int
) -> list[Window]:
    """When messages may have been accepted of which nothing is left."""
    found = []
    for one in remainders:
        after = one.archived_ms
        if not one.whole:
            ends = [now if one.first_ms is None else one.first_ms]
            ends += [started] if started > (after or 0) else []
            reason = "between the last archived event and the server's return"
            until = max(min(ends), after or 0)
            found.append(Window(one.topic, after, until, reason, one.shard))
    names = {one.topic for one in remainders}
    for gap in archive.gaps():
        if gap.topic in names:
            until = _entry_ms(gap.to_id) or datetime_ms(gap.at)
            after = _entry_ms(gap.after_id)
            found.append(Window(gap.topic, after, until, gap.reason, gap.shard))
    return found


def _entry_ms(entry: str | None) -> int | None:
    return entry_number(entry)[0] or None if entry else None


def _told(
    spark: SparkSession, folder: Folder, windows: list[Window], began: float, *, dry_run: bool
) -> Restoration:
    """Count the lists, write them for people too, and sum up."""
    rows = spark.read.schema(LIST_SCHEMA).parquet(folder.path("lists"))
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
        for outcome, number in counts.items() if number and outcome != "live"
    }  # fmt: skip
    result = Restoration(
        dry_run=dry_run, counts=counts, by_topic=by_topic, possibly_lost=windows,
        where=folder.where, seconds=round(time.monotonic() - began, 3), first=first,
    )  # fmt: skip
    summary = asdict(result)
    del summary["first"]
    folder.write_summary(summary)
    return result


FIRST_LINES = 5
"""Of each list so many are told at once; the rest stands in the directory."""
