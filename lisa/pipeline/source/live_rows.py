"""Collects live messages as rows, with their bodies and times of expiry.

Lengths of bodies are read first, so that a reply with bodies has at most BYTES_PER_CALL, or a
single body.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import pyarrow as pa

from lisa.core.model.sharding import shard_suffix, topic_of
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store, portions
from lisa.pipeline.source.events import opened
from lisa.pipeline.source.read_columns import timestamps, to_batch

BATCH_ROWS = 10_000
BATCH_BYTES = 16 << 20


class LiveMessages:
    """Messages in the same state and group, as columns."""

    def __init__(self, state: str, group: str | None, ids: list[str], dues: list[int]) -> None:
        self.state = state
        self.group = group
        self.ids = ids
        self.dues: Sequence[int | None] = dues
        self.attempts: Sequence[int] = [0] * len(ids)
        self.reasons: Sequence[str | None] = [None] * len(ids)
        self.consumers: Sequence[str | None] = [None] * len(ids)


class RowCollector:
    """Collects rows, each id once per group, and returns them as record batches of a schema."""

    def __init__(self, topic: str, schema: pa.Schema) -> None:
        self._topic = topic
        self._schema = schema
        self._seen: set[tuple[str | None, str]] = set()
        self._columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        names = set(schema.names)
        self._with_bodies = bool(names & {"body", "headers", "kind", "envelope"})
        self._with_expiry = "expires" in names
        self._bytes = 0

    @property
    def full(self) -> bool:
        """Whether there are enough rows for a record batch."""
        return len(self._columns["id"]) >= BATCH_ROWS or self._bytes >= BATCH_BYTES

    def take(self) -> pa.RecordBatch:
        """The rows added since the last batch."""
        columns: dict[str, Any] = dict(self._columns)
        self._columns = {name: [] for name in _COLUMNS}
        rows, self._bytes = len(columns["id"]), 0
        for name in ("due", "expires"):
            columns[name] = timestamps(pa.array(columns[name], pa.int64()))
        columns["topic"] = pa.repeat(pa.scalar(topic_of(self._topic)), rows)
        columns["shard"] = pa.repeat(pa.scalar(shard_suffix(self._topic), pa.string()), rows)
        envelopes = columns.pop("envelopes")
        if self._with_bodies:
            columns.update(opened(envelopes), envelope=envelopes)
        return to_batch(self._schema, columns, rows)

    def __len__(self) -> int:
        return len(self._columns["id"])

    def add(self, store: Store, found: LiveMessages) -> Flow[None]:
        """Add messages with their other columns; messages that no longer exist are skipped."""
        fresh = [i for i, one in enumerate(found.ids) if (found.group, one) not in self._seen]
        ids = [found.ids[i] for i in fresh]
        if not ids:
            return
        self._seen.update((found.group, one) for one in ids)
        bodies: list[bytes | None] = [b""] * len(ids)
        if self._with_bodies:
            bodies = yield from _bodies(store, self._topic, ids)
        ends = (yield from self._ends(store, ids)) if self._with_expiry else [None] * len(ids)
        columns = self._columns
        for index, i in enumerate(fresh):
            body = bodies[index]
            if body is None:
                continue
            self._bytes += len(body)
            values = (
                ids[index],
                found.group,
                found.state,
                found.dues[i],
                found.attempts[i],
                found.reasons[i],
                found.consumers[i],
                ends[index],
                body,
            )
            for name, value in zip(_COLUMNS, values, strict=True):
                columns[name].append(value)

    def _ends(self, store: Store, ids: Sequence[str]) -> Flow[list[int | None]]:
        key = store.keys.topic(self._topic).expiry
        if not (yield from store.command("EXISTS", key)):
            return [None] * len(ids)
        scores = yield from store.commands([("ZSCORE", key, one) for one in ids])
        return [None if score is None else int(float(score)) for score in scores]


_COLUMNS = (
    "id",
    "group",
    "state",
    "due",
    "attempts",
    "reason",
    "consumer",
    "expires",
    "envelopes",
)


def _bodies(store: Store, topic: str, ids: Sequence[str]) -> Flow[list[bytes | None]]:
    """The envelopes of ids, None for messages that no longer exist."""
    keys = [store.keys.topic(topic).body(one) for one in ids]
    lengths = yield from store.commands([("STRLEN", key) for key in keys])
    bodies: list[bytes | None] = []
    for some in portions(zip(keys, lengths, strict=True), len(keys), itemgetter(1)):
        bodies += yield from store.command("MGET", *(key for key, _ in some))
    return bodies
