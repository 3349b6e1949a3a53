"""Folds events into messages: one row per message and life, with the state `Producer.get` returns.

A *life* of a message begins with the call that sent it; the envelope contains that call's token.
The events of a life, in journal order (`at`, `seq`), determine its state:

- An event of the whole topic (sent, replaced, rescheduled, restored, mended with `no-place`) moves
  the message to `waiting`. Earlier states of groups no longer count, except that groups which have
  settled the message stay settled.
- Otherwise the last event of each group determines the state in that group.
- The first event that settles a life ends it; later events of that life change nothing.
- A life that is followed by another life of the same id is settled: `cancelled` if it was replaced,
  `lost` if no event records its end.

A sharded topic has one journal per shard, and the clocks of their servers differ slightly. Events
are therefore ordered within a shard only, and belong to the last life begun in that shard: an id is
live in one shard at a time, and a life stays in its shard until it ends; only after the number of
shards has changed can the next life begin in another shard. Times of different shards are compared
in two cases only:

- A restore put a life into another shard, long after the last event in its old shard.
- No journal records the end of a life, and its id was sent again in another shard after its last
  event. To confuse the two lives, clocks would have to differ by more than the whole earlier life
  and the following change of shards.

The fold is one shuffle by topic and id and two sorts within each partition: its cost is linear in
the number of events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as sf

from lisa.pipeline.archive.schemas import EVENT_SCHEMA, MESSAGES_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

THROUGH = ("acked", "purged", "expired")
"""States in which a group has settled the message."""


BEGINNINGS = ("sent", "replaced", "restored")
"""Events that carry the envelope."""

LIFE_SCHEMA_FIELDS = ("life", "next_state", "next_at", "elsewhere")
"""Columns that `lives` adds to each event."""

_COLUMNS = [name for name in EVENT_SCHEMA.names if name != "number"]


def fold(events: DataFrame) -> DataFrame:
    """Rows of EVENT_SCHEMA or LOG_SCHEMA -> rows of MESSAGES_SCHEMA.

    events: all events of the ids concerned, in any order; repeated events are harmless.
    """
    return fold_lives(lives(events))


def fold_lives(events: DataFrame, *kept: str) -> DataFrame:
    """Rows returned by `lives` -> rows of MESSAGES_SCHEMA.

    kept: further columns of both, each with the same value in all events of a life.
    """
    more = [sf.any_value(name).alias(name) for name in kept]
    parts = events.groupBy("topic", "id", "life", "group").agg(*_of_a_group(), *more)
    whole = parts.groupBy("topic", "id", "life").agg(*_of_a_life(), *more)
    return _rows(whole, kept)


def host_of(actor: str = "actor") -> Column:
    """The host in an actor, `role@host:pid`; null if there is none. A role may contain `@`."""
    found = sf.regexp_extract(actor, r"@([^@]*):[0-9]+$", 1)
    return sf.when(found != "", found)


def _order() -> Column:
    return sf.struct("at", "seq")


def _is(*states: str) -> Column:
    return sf.col("state").isin(*states)


def _last(value: Column, where: Column) -> Column:
    """The value in the last event that meets the condition."""
    return sf.max_by(value, sf.when(where, _order()))


def _of_a_group() -> list[Column]:
    """Aggregates over the events of one group in one life; group null is the whole topic."""
    whole = sf.col("group").isNull()
    waits = whole & (
        _is(*BEGINNINGS, "rescheduled") | (_is("mended") & sf.col("reason").endswith("no-place"))
    )
    terms = _is(*BEGINNINGS, "rescheduled", "requeued")
    expires = sf.when(~_is("requeued"), sf.col("expires"))
    stands = ~whole & ~_is("extended", "mended", "cancelled", "lost")
    begun = _is(*BEGINNINGS)
    return [
        sf.max(_order()).alias("last"),
        sf.max_by(sf.struct("at", "actor", "next_state", "next_at"), _order()).alias("latest"),
        sf.max(sf.when(waits, _order())).alias("waits"),
        _last(sf.col("due"), whole & sf.col("due").isNotNull()).alias("own_due"),
        sf.min_by("due", sf.when(sf.col("due").isNotNull(), _order())).alias("first_due"),
        _last(sf.struct(_order().alias("order"), expires.alias("expires")), terms).alias("terms"),
        _last(
            sf.struct(_order().alias("order"), "policy", "envelope"),
            begun & sf.col("envelope").isNotNull(),
        ).alias("content"),
        sf.min(sf.when(_is("sent", "replaced"), sf.col("at"))).alias("sent_at"),
        _last(sf.struct(_order().alias("order"), "reason"), sf.col("reason").isNotNull()).alias(
            "why"
        ),
        sf.min(sf.when(sf.col("settled"), sf.struct("at", "seq", "state"))).alias("settled"),
        sf.min(
            sf.when(
                _is("in_flight") & (sf.col("attempt") == 1) & sf.col("late_us").isNotNull(),
                sf.struct("at", "seq", "late_us"),
            )
        ).alias("late"),
        sf.max(sf.when(whole, sf.col("attempt"))).alias("own_attempts"),
        _last(_standing(), stands).alias("stands"),
    ]


def _standing() -> Column:
    """The state of the message in a group after an event of that group."""
    state = (
        sf.when(_is("requeued", "deferred"), "retry")
        .when(_is("restored"), sf.coalesce("place", sf.lit("retry")))
        .otherwise(sf.col("state"))
    )
    before = sf.greatest(sf.col("attempt") - 1, sf.lit(0))
    failed = sf.when(_is("ready", "in_flight", "acked"), before)
    failed = failed.when(_is("requeued"), sf.lit(0)).otherwise(sf.col("attempt"))
    due = sf.when(_is("requeued"), sf.coalesce("due", "at")).when(~_is(*THROUGH), sf.col("due"))
    return sf.struct(
        _order().alias("order"),
        state.alias("state"),
        failed.alias("attempts"),
        due.alias("due"),
        "at",
    )


def _of_a_life() -> list[Column]:
    """Aggregates over the groups of one life."""
    newest = sf.when(
        sf.col("stands").isNotNull() & sf.col("group").isNotNull(),
        sf.struct(
            "group",
            "stands.state",
            "stands.attempts",
            "stands.due",
            "why.reason",
            "stands.at",
            "stands.order",
        ),
    )
    return [
        sf.max_by("latest", "last").alias("latest"),
        sf.max("waits").alias("waits"),
        sf.max("own_due").alias("own_due"),
        sf.min("first_due").alias("first_due"),
        sf.max_by("terms.expires", "terms.order").alias("expires"),
        sf.max_by("content", "content.order").alias("content"),
        sf.min("sent_at").alias("sent_at"),
        sf.max_by("why.reason", "why.order").alias("reason"),
        sf.min("settled").alias("settled"),
        sf.min("late").alias("late"),
        sf.max("own_attempts").alias("own_attempts"),
        # collect_list skips nulls.
        sf.array_sort(sf.collect_list(newest)).alias("stood"),
    ]


def _rows(whole: DataFrame, kept: Sequence[str]) -> DataFrame:
    held = sf.filter(
        "stood",
        lambda one: (
            ~one["state"].isin(*THROUGH)
            & (sf.col("waits").isNull() | (one["order"] > sf.col("waits")))
        ),
    )
    envelope = sf.col("content.envelope")
    ended, next_state = sf.col("settled"), sf.col("latest.next_state")
    superseded = ended.isNull() & next_state.isNotNull()
    replaced = superseded & (next_state == "replaced")
    prepared = whole.withColumns({"held": held, "superseded": superseded, **_decoded(envelope)})
    states = sf.transform("held", lambda one: one["state"])
    state = sf.when(ended.isNotNull(), ended["state"])
    state = state.when(replaced, "cancelled").when(sf.col("superseded"), "lost")
    for name in ("in_flight", "ready", "parked", "retry", "garbage"):
        state = state.when(sf.array_contains(states, name), name)
    why = sf.when(replaced, "replaced by a later send of the same id").when(
        sf.col("superseded"),
        "the same id was sent again, and no event records how this message ended",
    )
    failures = sf.transform("stood", lambda one: one["attempts"])
    columns = {
        "token": sf.col("life"),
        "state": state.otherwise("waiting"),
        "settled": ended.isNotNull() | sf.col("superseded"),
        "due": sf.coalesce("own_due", "first_due"),
        "policy": sf.col("content.policy"),
        # `greatest` skips nulls.
        "attempts": sf.greatest(sf.array_max(failures), sf.col("own_attempts"), sf.lit(0)),
        "updated_at": sf.when(sf.col("superseded"), sf.col("latest.next_at")).otherwise(
            sf.col("latest.at")
        ),
        "settled_at": sf.coalesce(
            ended["at"], sf.when(sf.col("superseded"), sf.col("latest.next_at"))
        ),
        "actor": sf.col("latest.actor"),
        "host": host_of("latest.actor"),
        "reason": sf.coalesce(why, sf.col("reason")),
        "late_us": sf.col("late.late_us"),
        "groups": sf.transform("stood", _group),
    }
    names = (*MESSAGES_SCHEMA.names, *kept)
    made = [columns.get(name, sf.col(name)).alias(name) for name in names]
    return prepared.select(*made)


def _group(stood: Column) -> Column:
    names = ("group", "state", "attempts", "due", "reason", "at")
    return sf.struct(*(stood[name].alias(name) for name in names))


def _decoded(envelope: Column) -> dict[str, Column]:
    """Kind, headers and body of an envelope (see core.model.envelope), decoded in the JVM.

    For an envelope of another version, or a damaged one, kind is null and body the whole envelope.
    """
    digits = sf.substring(envelope, 12, 4)
    size = sf.when(digits == sf.lit(b"0000"), sf.lit(0)).when(
        digits.cast("string").rlike("^[0-9a-f]{4}$"),
        sf.conv(digits.cast("string"), 16, 10).try_cast("int"),
    )
    kind = sf.substring(envelope, 11, 1).cast("string")
    whole = (
        (sf.substring(envelope, 1, 1) == sf.lit(b"1"))
        & kind.isin("j", "s", "b")
        & (sf.octet_length(envelope) >= size + 15)
    )
    headers = sf.when(size == 0, sf.create_map().cast("map<string,string>")).otherwise(
        sf.from_json(sf.substring(envelope, sf.lit(16), size).cast("string"), "map<string,string>")
    )
    readable = whole & headers.isNotNull()
    rest = sf.substring(envelope, size + 16, sf.octet_length(envelope))
    return {
        "kind": sf.when(readable, kind),
        "headers": sf.when(readable, headers),
        "body": sf.when(readable, rest).otherwise(envelope),
    }


def lives(events: DataFrame, *, sharded: bool = True) -> DataFrame:
    """Drop events after the end of their life, and add the columns LIFE_SCHEMA_FIELDS.

    sharded: whether events may have shards; without any, two of five windows are not needed.
    life: the token of the life; null before the first known envelope.
    next_state, next_at: state and time of the event that begins the next life; set in the last
        event of a life.
    elsewhere: whether the next life is in the journal of another shard, which may have been read
        further than this one.
    """
    tagged = _tagged(events, sharded=sharded)
    another = sf.col("next_begun").isNotNull() & ~sf.col("next_begun").eqNullSafe(sf.col("life"))
    newest, elsewhere = sf.col("newest"), sf.expr("false")
    if sharded:
        elsewhere = ~another & sf.coalesce(
            ~newest["shard"].eqNullSafe(sf.col("shard"))
            & ~newest["begun"].eqNullSafe(sf.col("life"))
            & (newest["at"] > sf.col("at")),
            sf.expr("false"),
        )
    return (
        # This may drop the last event of a life, but then the life is settled, and the event
        # that follows it is not needed.
        tagged.where(~sf.col("over") | sf.col("begun").isNotNull())
        .withColumns(
            {
                "next_state": sf.when(another, sf.col("next_state")).when(elsewhere, "sent"),
                "next_at": sf.when(another, sf.col("next_at")).when(elsewhere, newest["at"]),
                "elsewhere": elsewhere,
            }
        )
        .drop("begun", "ended", "over", "next_begun", "newest")
    )


def _tagged(events: DataFrame, *, sharded: bool) -> DataFrame:
    """Add to each event its life, the next event, and the newest life of the id."""
    # Spark needs only one sort for both windows.
    of_id = Window.partitionBy("topic", "id").orderBy("shard", "at", "seq")
    of_id = of_id.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    of_journal = ("topic", "id", "shard") if sharded else ("topic", "id")
    in_order = Window.partitionBy(*of_journal).orderBy("at", "seq")
    so_far = in_order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    before = in_order.rowsBetween(Window.unboundedPreceding, -1)
    begins = sf.col("state").isin(*BEGINNINGS) & sf.col("envelope").isNotNull()
    token = sf.when(begins, sf.substring("envelope", 2, 8).cast("string"))
    begin = sf.when(begins, sf.struct("at", "seq", "shard", token.alias("begun")))
    newest = sf.max(begin).over(of_id) if sharded else sf.when(sf.expr("false"), begin)
    ends = sf.when(begins, sf.expr("false")).when(sf.col("settled"), sf.expr("true"))
    return (
        events.where(sf.col("id").isNotNull())
        .select(*_COLUMNS, token.alias("begun"), ends.alias("ended"))
        .withColumn("newest", newest)
        .withColumns(
            {
                "life": sf.last("begun", ignorenulls=True).over(so_far),
                "over": sf.coalesce(
                    sf.last("ended", ignorenulls=True).over(before), sf.expr("false")
                ),
                "next_begun": sf.lead("begun").over(in_order),
                "next_state": sf.lead("state").over(in_order),
                "next_at": sf.lead("at").over(in_order),
            }
        )
    )


def of_lives(events: DataFrame, keys: DataFrame) -> DataFrame:
    """Rows of `lives`, of unsharded events, that belong to given lives.

    keys: topic, id, life (null: the one without a known beginning); unique.
    """
    wanted = keys.select("topic", "id", sf.col("life").alias("wanted"))
    some = events.join(wanted.select("topic", "id"), ["topic", "id"], "left_semi")
    found = lives(some, sharded=False).join(wanted, ["topic", "id"])
    return found.where(sf.col("life").eqNullSafe(sf.col("wanted"))).drop("wanted")


def with_gone(events: DataFrame) -> DataFrame:
    """Rows of `lives` with a column `gone`: whether the life of the event has ended.

    If a life only counts as ended because its id was sent again in another shard, its real end may
    be in a later batch: then all events of that id are kept.
    """
    # The windows below and the aggregation in `fold_lives` can use this order; each would otherwise
    # sort again.
    events = events.sortWithinPartitions("topic", "id", "life", "group")
    life = Window.partitionBy("topic", "id", "life")
    last = sf.max_by(sf.struct("next_state", "elsewhere"), sf.struct("at", "seq")).over(life)
    marked = events.withColumns({"ended": sf.max("settled").over(life), "last": last})
    waits = sf.max(~sf.col("ended") & sf.col("last.elsewhere"))
    gone = sf.col("ended") | sf.col("last.next_state").isNotNull()
    gone &= ~waits.over(Window.partitionBy("topic", "id"))
    return marked.withColumn("gone", gone).drop("ended", "last")
