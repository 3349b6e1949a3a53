"""From events to messages: one row per message and life, as `Producer.get` would tell it.

A *life* of a message begins with the call that sent it, whose token its envelope carries. What
happens to it is read off its events in order of (`at`, `seq`), which is that of the journal:

- An event of the whole topic puts it into `waiting` (sent, replaced, rescheduled, restored, mended
  without a place): what groups had before is history, except that they are through with it.
- Otherwise each group's last event says how that group has it.
- The first event that settles a life ends it; later ones of that life change nothing.
- A life that another one of the same id takes the place of is settled by that: `cancelled` where it
  was replaced, `lost` where nothing tells how it ended.

A topic that is split has a journal for each place, and the clocks of their servers differ a little.
So events are put in order within a place only, and belong to the life that was begun there last: an
id is live in one place at a time, and a life stays where it began until it ends; only after the
number of shards was changed does its next one begin elsewhere. Time decides between places only

- of a life that a restore put back elsewhere: long after the last event that its old place wrote;
- that a life is over whose end no journal tells, as the id was sent anew elsewhere since its last
  event. For that to be said of the later one, clocks would have to differ by more than the whole
  earlier life and the change of shards behind it took.

It is one shuffle by topic and id, and sorts within it: linear, whatever the number of messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as sf

from lisa.pipeline.archive.schemas import EVENT_SCHEMA, MESSAGES_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["LIFE_SCHEMA_FIELDS", "fold", "fold_lives", "host_of", "lives"]

BEGINNINGS = ("sent", "replaced", "restored")
"""Events that carry the envelope."""

THROUGH = ("acked", "purged", "expired")
"""A group whose last event is one of these owes the message nothing."""

LIFE_SCHEMA_FIELDS = ("life", "next_state", "next_at", "elsewhere")
"""What `lives` adds to each event."""

_COLUMNS = [name for name in EVENT_SCHEMA.names if name != "number"]


def fold(events: DataFrame) -> DataFrame:
    """Rows of EVENT_SCHEMA or LOG_SCHEMA -> rows of MESSAGES_SCHEMA.

    events: all events of the ids concerned, in any order; the same one twice does no harm.
    """
    return fold_lives(lives(events))


def lives(events: DataFrame) -> DataFrame:
    """The events that count, each with its life and, at a life's end, what comes after.

    life: the token; null before any envelope is known.
    next_state, next_at: of the event that begins the next life, in a life's last event.
    elsewhere: that one stands in another place's journal, of which more may be known than of this.
    """
    # Both windows are served by one sort.
    of_id = Window.partitionBy("topic", "id").orderBy("shard", "at", "seq")
    of_id = of_id.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    in_order = Window.partitionBy("topic", "id", "shard").orderBy("at", "seq")
    so_far = in_order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    before = in_order.rowsBetween(Window.unboundedPreceding, -1)
    begins = sf.col("state").isin(*BEGINNINGS) & sf.col("envelope").isNotNull()
    token = sf.when(begins, sf.substring("envelope", 2, 8).cast("string"))
    begin = sf.when(begins, sf.struct("at", "seq", "shard", token.alias("begun")))
    ends = sf.when(begins, sf.expr("false")).when(sf.col("settled"), sf.expr("true"))
    tagged = (
        events.where(sf.col("id").isNotNull())
        .select(*_COLUMNS, token.alias("begun"), ends.alias("ended"))
        .withColumn("newest", sf.max(begin).over(of_id))
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
    another = sf.col("next_begun").isNotNull() & ~sf.col("next_begun").eqNullSafe(sf.col("life"))
    newest = sf.col("newest")
    elsewhere = ~another & sf.coalesce(
        ~newest["shard"].eqNullSafe(sf.col("shard"))
        & ~newest["begun"].eqNullSafe(sf.col("life"))
        & (newest["at"] > sf.col("at")),
        sf.lit(False),  # noqa: FBT003
    )
    return (
        # The last event of a life that is over may be one that no longer counts: but then the
        # life is settled, and what came after it is of no interest.
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


def fold_lives(events: DataFrame) -> DataFrame:
    """What `lives` gave -> rows of MESSAGES_SCHEMA."""
    parts = events.groupBy("topic", "id", "life", "group").agg(*_of_a_group())
    whole = parts.groupBy("topic", "id", "life").agg(*_of_a_life())
    return _rows(whole)


def host_of(actor: str = "actor") -> Column:
    """The machine named in an actor, `who@host:pid`; null if there is none."""
    found = sf.regexp_extract(actor, r"@(.*):[0-9]+$", 1)
    return sf.when(found != "", found)


def _order() -> Column:
    return sf.struct("at", "seq")


def _is(*states: str) -> Column:
    return sf.col("state").isin(*states)


def _last(value: Column, where: Column) -> Column:
    """The value at the last event for which the condition holds."""
    return sf.max_by(value, sf.when(where, _order()))


def _of_a_group() -> list[Column]:
    """Of the events of one group (null: those of the whole topic) in one life."""
    whole = sf.col("group").isNull()
    waits = whole & (
        _is(*BEGINNINGS, "rescheduled") | (_is("mended") & sf.col("reason").endswith("no-place"))
    )
    terms = _is(*BEGINNINGS, "rescheduled", "requeued")
    expires = sf.when(~_is("requeued"), sf.col("expires"))
    stands = ~whole & ~_is("extended", "mended", "cancelled", "lost")
    state = (
        sf.when(_is("requeued"), "retry")
        .when(_is("restored"), sf.coalesce("place", sf.lit("retry")))
        .otherwise(sf.col("state"))
    )
    before = sf.greatest(sf.col("attempt") - 1, sf.lit(0))
    failed = sf.when(_is("ready", "in_flight", "acked"), before)
    failed = failed.when(_is("requeued"), sf.lit(0)).otherwise(sf.col("attempt"))
    due = sf.when(_is("requeued"), sf.coalesce("due", "at")).when(~_is(*THROUGH), sf.col("due"))
    begun = _is(*BEGINNINGS)
    return [
        sf.max(_order()).alias("last"),
        sf.max_by(sf.struct("at", "actor", "next_state", "next_at"), _order()).alias("latest"),
        sf.max(sf.when(waits, _order())).alias("waits"),
        _last(sf.col("due"), whole & sf.col("due").isNotNull()).alias("own_due"),
        sf.min_by("due", sf.when(sf.col("due").isNotNull(), _order())).alias("first_due"),
        _last(sf.struct(_order().alias("order"), expires.alias("expires")), terms).alias("terms"),
        _last(sf.struct(_order().alias("order"), "policy", "envelope"),
              begun & sf.col("envelope").isNotNull()).alias("content"),
        sf.min(sf.when(_is("sent", "replaced"), sf.col("at"))).alias("sent_at"),
        _last(sf.struct(_order().alias("order"), "reason"),
              sf.col("reason").isNotNull()).alias("why"),
        sf.min(sf.when(sf.col("settled"), sf.struct("at", "seq", "state"))).alias("settled"),
        sf.min(sf.when(_is("in_flight") & (sf.col("attempt") == 1) & sf.col("late_us").isNotNull(),
                       sf.struct("at", "seq", "late_us"))).alias("late"),
        sf.max(sf.when(whole, sf.col("attempt"))).alias("own_attempts"),
        _last(sf.struct(_order().alias("order"), state.alias("state"), failed.alias("attempts"),
                        due.alias("due"), "at"), stands).alias("stands"),
    ]  # fmt: skip


def _of_a_life() -> list[Column]:
    """Of what its groups' parts say, put together."""
    newest = sf.when(sf.col("stands").isNotNull() & sf.col("group").isNotNull(), sf.struct(
        "group", "stands.state", "stands.attempts", "stands.due", "why.reason", "stands.at",
        "stands.order",
    ))  # fmt: skip
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
        # Nulls are left out of a list.
        sf.array_sort(sf.collect_list(newest)).alias("stood"),
    ]


def _rows(whole: DataFrame) -> DataFrame:
    held = sf.filter("stood", lambda one: ~one["state"].isin(*THROUGH) & (
        sf.col("waits").isNull() | (one["order"] > sf.col("waits"))
    ))  # fmt: skip
    envelope = sf.col("content.envelope")
    ended, next_state = sf.col("settled"), sf.col("latest.next_state")
    superseded = ended.isNull() & next_state.isNotNull()
    replaced = superseded & (next_state == "replaced")
    prepared = whole.withColumns({"held": held, "superseded": superseded, **_decoded(envelope)})
    places = sf.transform("held", lambda one: one["state"])
    state = sf.when(ended.isNotNull(), ended["state"])
    state = state.when(replaced, "cancelled").when(sf.col("superseded"), "lost")
    for name in ("in_flight", "ready", "retry", "garbage"):
        state = state.when(sf.array_contains(places, name), name)
    why = sf.when(replaced, "replaced by a later send of the same id").when(
        sf.col("superseded"), "the same id was sent anew, and no event tells how this one ended"
    )
    failures = sf.transform("stood", lambda one: one["attempts"])
    groups = sf.transform("stood", lambda one: sf.struct(
        *(one[name].alias(name) for name in ("group", "state", "attempts", "due", "reason", "at"))
    ))  # fmt: skip
    columns = {
        "token": sf.col("life"),
        "state": state.otherwise("waiting"),
        "settled": ended.isNotNull() | sf.col("superseded"),
        "due": sf.coalesce("own_due", "first_due"),
        "policy": sf.col("content.policy"),
        # Nulls do not count for `greatest`.
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
        "groups": groups,
    }
    made = [columns.get(name, sf.col(name)).alias(name) for name in MESSAGES_SCHEMA.names]
    return prepared.select(*made)


def _decoded(envelope: Column) -> dict[str, Column]:
    """Kind, headers and body of an envelope (see core.envelope), without leaving the JVM.

    One that is of another version or damaged has no kind, and stands whole in the body.
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
