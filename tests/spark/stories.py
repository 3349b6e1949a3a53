"""Generated lives of messages, a reference fold in plain Python, and checks of an archive."""

import random
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from lisa.core.model.envelope import decode_envelope, encode_head, encode_headers, encode_tail
from lisa.core.model.errors import InvalidMessage
from lisa.pipeline.archive import Archive, open_archive
from lisa.pipeline.archive.schemas import EVENT_SCHEMA, LOG_SCHEMA, MESSAGES_SCHEMA
from lisa.pipeline.source.read_columns import arrow_schema

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BEGIN_MS = 1_790_000_000_000
PLACES = ("in_flight", "ready", "retry", "garbage")
THROUGH = ("acked", "purged", "expired")

Event = dict[str, Any]
"""One event: the columns of EVENT_SCHEMA as Python values, times in epoch ms."""


def moment(ms: int | None) -> datetime | None:
    """A time in Spark's form."""
    return None if ms is None else EPOCH + timedelta(milliseconds=ms)


def envelope(token: str, body: object, headers: dict[str, str] | None = None) -> bytes:
    """An envelope in the producers' format."""
    return encode_head(token) + encode_tail(body, encode_headers(headers))


def event(topic: str, at: int, seq: int, number: int, **fields: Any) -> Event:
    """One event; fields that are not given are absent."""
    blank: Event = dict.fromkeys(
        ("group", "envelope", "due", "expires", "policy", "reason", "place", "late_us", "shard")
    )
    return blank | {
        "topic": topic,
        "at": at,
        "seq": seq,
        "number": number,
        "attempt": 0,
        "actor": "consumer@box.example:7",
        "settled": False,
        **fields,
    }


def row(one: Event) -> dict[str, Any]:
    """An event as a row of EVENT_SCHEMA."""
    return one | {name: moment(one[name]) for name in ("at", "due", "expires")}


def entry(one: Event) -> tuple[str, dict[str, Any]]:
    """An event as an entry of the stream: id and fields."""
    fields = {
        "n": one["number"],
        "actor": one["actor"],
        "id": one["id"],
        "state": one["state"],
        "group": one["group"] or "",
        "attempt": one["attempt"],
    }
    names = {"late_us": "late"}
    for name in ("due", "envelope", "expires", "policy", "reason", "place", "late_us"):
        if one[name] is not None:
            fields[names.get(name, name)] = one[name]
    if one["settled"]:
        fields["end"] = 1
    return f"{one['at']}-{one['seq']}", fields


@dataclass
class Stories:
    """Generated, interleaved lives of messages of one topic, with consecutive event numbers."""

    topic: str
    seed: int = 1
    begin_ms: int = BEGIN_MS
    groups: tuple[str, ...] = ("audit", "lisa")
    body_bytes: int = 40
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._ms, self._seq, self._number = self.begin_ms, 0, 0
        self._made = 0

    def extend(self, messages: int) -> list[Event]:
        """The events of `count` more messages, with interleaved lives."""
        stories = [self._life(self._name()) for _ in range(messages)]
        made = []
        while stories:
            story = self.random.choice(stories[:20])
            happened = next(story, None)
            if happened is None:
                stories.remove(story)
                continue
            if self.random.random() < 0.5:
                self._ms, self._seq = self._ms + self.random.choice((1, 3, 900, 60_000)), 0
            else:
                self._seq += 1
            self._number += 1
            made.append(event(self.topic, self._ms, self._seq, self._number, **happened))
        self.events += made
        return made

    def _name(self) -> str:
        self._made += 1
        return f"{'Zoë-' if self._made % 7 == 0 else 'id-'}{self.seed}-{self._made}"

    def _token(self) -> str:
        return "".join(self.random.choices("ABCDEFGHabcdefgh0123~-_", k=8))

    def _begin(self, name: str, state: str) -> Event:
        dice = self.random.random
        begun: Event = {"id": name, "state": state, "due": self._ms + 5000}
        bodies = ({"order": self._made, "x": "y" * self.body_bytes}, "text ü", b"\0\xff")
        headers = {"bizkey": "ö\n" + name} if dice() < 0.3 else None
        begun["envelope"] = envelope(self._token(), self.random.choice(bodies), headers)
        if dice() < 0.05:
            begun["envelope"] = b"9" + self._token().encode() + b"-what is this"
        if dice() < 0.3:
            begun["expires"] = self._ms + 90_000
        if dice() < 0.2:
            begun["policy"] = "0,0,120000~0.2"
        return begun

    def _life(self, name: str) -> Iterator[Event]:
        dice = self.random.random
        if dice() < 0.95:  # the others were sent before the journal was on
            yield self._begin(name, "sent")
        for _ in range(3):
            if dice() < 0.15:
                put_off: Event = {"id": name, "state": "rescheduled", "due": self._ms + 7000}
                yield put_off | ({"expires": self._ms + 99_000} if dice() < 0.3 else {})
            if dice() < 0.1:
                yield self._begin(name, "replaced")
            fate = dice()
            if fate < 0.07:
                end = "skipped" if fate < 0.02 else "cancelled"
                yield {"id": name, "state": end, "settled": True}
                if dice() < 0.5:
                    return
                yield self._begin(name, "sent")
            if dice() < 0.05:
                yield {
                    "id": name,
                    "state": "mended",
                    "reason": "leftover no-place",
                    "due": self._ms,
                }
        if dice() < 0.15:
            return
        yield from self._handled(name)
        if dice() < 0.1:
            yield self._begin(name, "sent")

    def _handled(self, name: str) -> Iterator[Event]:  # noqa: C901, PLR0912  a tree of dice
        dice, owing = self.random.random, list(self.groups)
        failed = dict.fromkeys(self.groups, 0)
        for group in self.groups:
            yield {"id": name, "group": group, "state": "ready", "attempt": 1, "due": self._ms}
        while owing and dice() < 0.9:
            group = self.random.choice(owing)
            one = {"id": name, "group": group, "attempt": failed[group] + 1, "due": self._ms}
            late = self.random.randint(-9, 9999) if failed[group] == 0 else None
            yield one | {"state": "in_flight", "late_us": late}
            if dice() < 0.2:
                yield one | {"state": "extended", "due": None}
            fate = dice()
            if fate < 0.5:
                owing.remove(group)
                yield one | {"state": "acked", "settled": not owing}
            elif fate < 0.8:
                failed[group] += 1
                yield one | {"state": "retry", "attempt": failed[group], "reason": f"Oh: {fate}"}
                if dice() < 0.2 and len(owing) == len(self.groups):
                    yield {"id": name, "state": "rescheduled", "due": self._ms + 60_000}
                    if dice() < 0.3:
                        return
                if dice() < 0.8:
                    yield one | {"state": "ready", "attempt": failed[group] + 1}
            elif fate < 0.9:
                failed[group] += 1
                dead = one | {"attempt": failed[group], "due": None}
                yield dead | {"state": "garbage", "reason": "no more"}
                if dice() < 0.5:
                    failed[group] = 0
                    yield one | {"state": "requeued", "attempt": 0}
                elif dice() < 0.5:
                    owing.remove(group)
                    yield dead | {"state": "purged", "settled": not owing}
            elif fate < 0.93:
                yield {"id": name, "state": "expired", "settled": True, "attempt": failed[group]}
                if dice() < 0.3:  # a late event without effect
                    yield {"id": name, "group": group, "state": "extended", "attempt": 1}
                return


def plain_fold(events: Iterable[Event]) -> dict[tuple[str, str, str | None], dict[str, Any]]:
    """The expected result of `fold`, computed without Spark: (topic, id, token) -> message."""
    found = {}
    in_order = sorted(events, key=lambda e: (e["topic"], e["id"], e["at"], e["seq"]))
    for (topic, name), some in groupby(in_order, key=lambda e: (e["topic"], e["id"])):
        runs: dict[str | None, list[Event]] = {}
        token: str | None = None
        followed: dict[str | None, Event] = {}
        for one in some:
            if one["envelope"] is not None:
                fresh = one["envelope"][1:9].decode()
                if fresh != token and runs.get(token):
                    followed[token] = one
                token = fresh
            elif any(e["settled"] for e in runs.get(token, [])):
                continue
            runs.setdefault(token, []).append(one)
        for token, run in runs.items():
            found[topic, name, token] = _folded(run, followed.get(token))
    return found


def _folded(run: list[Event], following: Event | None) -> dict[str, Any]:  # noqa: C901, PLR0912
    state: dict[str, Any] = dict.fromkeys(
        ("due", "expires", "policy", "reason", "late_us", "sent_at", "settled_at", "envelope")
    )
    groups: dict[str, dict[str, Any]] = {}
    held: set[str] = set()
    final, most = None, 0
    for one in run:
        kind, group = one["state"], one["group"]
        if one["envelope"] is not None:
            state |= {name: one[name] for name in ("expires", "policy", "envelope")}
        if kind in ("sent", "replaced") and state["sent_at"] is None:
            state["sent_at"] = one["at"]
        if one["reason"] is not None:
            state["reason"] = one["reason"]
        if one["settled"] and final is None:
            final, state["settled_at"] = kind, one["at"]
        if group is None:
            most = max(most, one["attempt"])
            if one["due"] is not None:
                state["due"] = one["due"]
            if kind == "rescheduled":
                state["expires"] = one["expires"]
            if kind != "mended" or one["reason"].endswith("no-place"):
                held.clear()
            continue
        if kind == "requeued":
            state["expires"] = None
        if kind == "extended":
            continue
        if kind == "in_flight" and one["attempt"] == 1 and state["late_us"] is None:
            state["late_us"] = one["late_us"]
        mine = groups.setdefault(group, {"reason": None})
        mine |= {
            "state": "retry" if kind == "requeued" else one["place"] or kind,
            "at": one["at"],
            "due": None if kind in THROUGH else one["due"],
        }
        mine["attempts"] = one["attempt"] - (kind in ("ready", "in_flight", "acked"))
        if one["reason"] is not None:
            mine["reason"] = one["reason"]
        (held.discard if kind in THROUGH else held.add)(group)
    if state["due"] is None:
        state["due"] = min((e["due"] for e in run if e["due"] is not None), default=None)
    standing = {groups[name]["state"] for name in held}
    state["state"] = final or next((name for name in PLACES if name in standing), "waiting")
    state["updated_at"] = run[-1]["at"]
    if final is None and following is not None:
        final = state["state"] = "cancelled" if following["state"] == "replaced" else "lost"
        state["updated_at"] = state["settled_at"] = following["at"]
        state["reason"] = (
            "replaced by a later send of the same id"
            if final == "cancelled"
            else "the same id was sent again, and no event records how this message ended"
        )
    state["settled"] = final is not None
    state["attempts"] = max([most, *(one["attempts"] for one in groups.values())])
    state["groups"] = {name: tuple(sorted(one.items())) for name, one in groups.items()}
    return state


def frame(spark: SparkSession, events: Iterable[Event]) -> DataFrame:
    rows = [row(one) for one in events]
    return spark.createDataFrame(pa.Table.from_pylist(rows, arrow_schema(EVENT_SCHEMA)))


def in_ms(values: dict[str, Any]) -> dict[str, Any]:
    """The values, with times in epoch ms."""

    def plain(value: Any) -> Any:
        if not isinstance(value, datetime):
            return value
        aware = value if value.tzinfo else value.replace(tzinfo=UTC)
        return round((aware - EPOCH).total_seconds() * 1000)

    return {name: plain(value) for name, value in values.items()}


TOLD = ("state", "settled", "policy", "attempts", "reason", "late_us")
TOLD_TIMES = ("due", "expires", "sent_at", "updated_at", "settled_at")


def told(messages: DataFrame) -> dict[tuple[str, str, str | None], dict[str, Any]]:
    """Rows of MESSAGES_SCHEMA in the shape of `plain_fold`."""
    found: dict[tuple[str, str, str | None], dict[str, Any]] = {}
    # Through Arrow, because a Row's timestamps are naive, in the machine's time zone.
    for one in messages.toArrow().to_pylist():
        key = one["topic"], one["id"], one["token"]
        assert key not in found, f"two rows for {key}"
        groups = {
            group.pop("group"): tuple(sorted(in_ms(group).items())) for group in one["groups"]
        }
        headers = dict(one["headers"]) if one["headers"] is not None else None
        found[key] = in_ms({name: one[name] for name in TOLD + TOLD_TIMES})
        found[key] |= {"groups": groups, "content": (one["kind"], headers, one["body"])}
    return found


def expected(events: Iterable[Event]) -> dict[tuple[str, str, str | None], dict[str, Any]]:
    found = plain_fold(events)
    for one in found.values():
        data = one.pop("envelope")
        one["content"] = (None, None, data)
        if data is not None:
            with suppress(InvalidMessage):
                taken = decode_envelope(data)
                one["content"] = (taken.kind, taken.headers, taken.body)
    return found


def entries(rows: Any) -> list[tuple[str, int]]:
    return sorted((row.topic, row.number) for row in rows.select("topic", "number").collect())


def check(spark: SparkSession, where: str, events: list[Event]) -> None:
    """Assert that an archive in files has exactly these events, as other programs see it, too."""
    check_archive(open_archive(spark, where), events)
    outside = DeltaTable(f"{where}/message_log").to_pyarrow_table(columns=["topic", "number"])
    assert sorted(map(tuple, (one.values() for one in outside.to_pylist()))) == sorted(
        (one["topic"], one["number"]) for one in events
    )


def check_archive(archive: Archive, events: list[Event]) -> None:
    """Assert that an archive has exactly these events, and the messages they fold to."""
    log = archive.log()
    assert log.columns == LOG_SCHEMA.names
    assert entries(log) == sorted((one["topic"], one["number"]) for one in events)
    messages = archive.messages()
    assert messages.schema.simpleString() == MESSAGES_SCHEMA.simpleString()
    assert told(messages) == expected(events)
    assert archive.offsets() == {
        topic: max(
            (one["number"], (f"{one['at']}-{one['seq']}", one["number"]))
            for one in events
            if one["topic"] == topic
        )[1]
        for topic in {one["topic"] for one in events}
    }
