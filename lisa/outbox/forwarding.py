"""Does the operations of rows in Redis, in the order of each message."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from lisa.core.model.clock import parse_zone
from lisa.core.model.envelope import encode_head
from lisa.core.model.errors import (
    ConfigError,
    KeyFull,
    LisaError,
    ServerUnavailable,
)
from lisa.core.redis.flow import Flow
from lisa.core.store.store import chunks
from lisa.core.transitions.base import HasWindow
from lisa.core.transitions.change import Cancel, Reschedule
from lisa.core.transitions.coalesce import is_rule
from lisa.core.transitions.enqueue import Enqueue
from lisa.outbox.outbox import CANCEL, SEND, RowOptions
from lisa.producer.calls import Encoded, coalesce, cost, parts
from lisa.producer.flows import Sending

STALE_S = 15.0
"""Rows that were read this long ago are not forwarded: their locks may be lost by then."""

_MALFORMED = (ValueError, TypeError, LookupError, msgspec.MsgspecError)
"""Errors of a row that Lisa can never send, such as InvalidMessage, or cannot read."""

_decode_options = msgspec.json.Decoder(RowOptions).decode
_NONE = RowOptions()


class OutboxRow(NamedTuple):
    """The columns of a row, and the database's clock and this machine's when it was read."""

    seq: int
    id_hash: int
    created_ms: int
    try_ms: int | None
    operation: str
    topic: str
    message_id: str
    token: str
    due: str
    written_options: str | None
    envelope: bytes
    now_ms: int
    is_followed: bool
    """Whether there are later operations on the message."""
    read_s: float

    @property
    def options(self) -> RowOptions:
        """The column `options`."""
        return _decode_options(self.written_options) if self.written_options else _NONE

    @property
    def age_ms(self) -> int:
        """How long the row has been there at least."""
        return self.now_ms - 1 - self.created_ms + int((time.monotonic() - self.read_s) * 1000)

    @property
    def kind(self) -> tuple[object, ...]:
        """Operations of the same kind can be one call."""
        is_alone = (self.operation == SEND and is_rule(self.due)) or bool(self.options.calendar)
        return self.topic, self.operation, self.options.mode, is_alone and self.seq


class RowFailure(NamedTuple):
    """Why an operation was not done. If it `is_final`, no further attempt can succeed."""

    reason: str
    is_final: bool


class Forwarding(Sending):
    """Steps of a relay. Middleware has run at the outbox."""

    def forward(self, rows: Sequence[OutboxRow]) -> Flow[dict[int, RowFailure | None]]:
        """Do operations, one for each message. Returns by `seq` why each failed, or None.

        Those that are not in the result had no turn, because the rows were read too long ago: their
        locks may be lost. Each operation can be repeated without a further effect; a sequence for
        one message could not. Raises ServerUnavailable; on a cluster only if no node answers.
        """
        results: dict[int, RowFailure | None] = {}
        kinds = defaultdict[object, list[OutboxRow]](list)
        for row in rows:
            try:
                kinds[row.kind].append(row)
            except _MALFORMED as error:
                results[row.seq] = RowFailure(f"cannot be read: {error}", is_final=True)
        for part in kinds.values():
            if time.monotonic() < part[0].read_s + STALE_S:
                yield from self._attempt(part, results)
        return results

    def _attempt(
        self, part: Sequence[OutboxRow], results: dict[int, RowFailure | None]
    ) -> Flow[Exception | None]:
        """Do operations of one kind; if the call fails, each half of them, for an error of one.

        Returns an error that all further operations of the topic would raise.
        """
        try:
            yield from self._do(part)
        except (LisaError, *_MALFORMED) as raised:
            error: Exception = raised
            if isinstance(error, ServerUnavailable) and not self._store.has_nodes:
                raise
            if len(part) > 1 and not isinstance(error, ServerUnavailable | ConfigError):
                middle = len(part) // 2
                further = yield from self._attempt(part[:middle], results)
                if further is None:
                    return (yield from self._attempt(part[middle:], results))
                error, part = further, part[middle:]
            is_final = isinstance(error, _MALFORMED)
            failure = RowFailure(str(error), is_final)
            results.update((row.seq, failure) for row in part)
            return None if is_final or isinstance(error, KeyFull) else error
        results.update((row.seq, None) for row in part)
        return None

    def _do(self, part: Sequence[OutboxRow]) -> Flow[None]:
        topic, operation = part[0].topic, part[0].operation
        if operation == SEND:
            yield from self._register(topic)
            yield from self._send_rows(topic, part)
            return
        yield from self._open()
        if operation == CANCEL:
            for some in chunks([row.message_id for row in part], self._size(topic, Cancel)):
                yield from self._write(Cancel(topic, some))
            return
        for rows in chunks(part, self._size(topic, Reschedule)):
            yield from self._reschedule_rows(topic, rows)

    def _send_rows(self, topic: str, rows: Sequence[OutboxRow]) -> Flow[None]:
        dues = yield from self._dues(topic, rows)
        options = [row.options for row in rows]
        whole = Encoded(
            [row.message_id for row in rows],
            dues,
            [row.envelope for row in rows],
            [own.ttl_ms for own in options],
            [own.policy for own in options],
            are_ids_new=False,
            has_local=any(own.has_local for own in options),
        )
        if is_rule(dues[0]):
            yield from self._put(coalesce(topic, whole, rows[0].token))
            return
        heads = [encode_head(row.token) for row in rows]
        tails = [head + row.envelope for head, row in zip(heads, rows, strict=True)]
        mode = options[0].mode
        size = self._size(topic, Enqueue) // cost(whole, mode)
        for part in parts(replace(whole, tails=tails), max(1, size)):
            yield from self._put(
                Enqueue(
                    topic,
                    part.ids,
                    part.dues,
                    part.tails,
                    part.ttls_ms,
                    part.policies,
                    mode,
                    window="",
                    has_local=part.has_local,
                )
            )

    def _reschedule_rows(self, topic: str, rows: Sequence[OutboxRow]) -> Flow[None]:
        first, options = rows[0], rows[0].options
        zone = None if options.tz is None else parse_zone(options.tz)
        if options.calendar:
            yield from self._reschedule_by_calendar(
                topic, first.message_id, None, zone, options.calendar, now_ms=first.created_ms
            )
            return
        dues = yield from self._dues(topic, rows)
        items = list(zip((row.message_id for row in rows), dues, strict=True))
        try:
            yield from self._write(Reschedule(topic, items, is_placed=False))
        except HasWindow:
            for message_id, due in items:
                yield from self._reschedule_by_calendar(topic, message_id, due, None, {})

    def _dues(self, topic: str, rows: Sequence[OutboxRow]) -> Flow[list[str]]:
        """The due times, in which what has passed of a delay is subtracted.

        The time until the rows were read is by the database's clock, and the time since then by
        this machine's, so that no clock is compared with another. A delay that has ended ends at an
        instant of Redis's clock, which tells how late the message is.
        """
        now_ms: int | None = None
        dues = []
        for row in rows:
            rule, plus, delay = row.due.rpartition("+")
            if plus:
                left_ms = int(delay) - max(0, row.age_ms)
                if left_ms <= 0 and now_ms is None:
                    now_ms = yield from self._store.server_time_ms(
                        self._store.keys.topic(topic).waiting
                    )
                delay = f"+{left_ms}" if left_ms > 0 else str((now_ms or 0) + left_ms)
            dues.append(rule + delay)
        return dues

    def _size(self, topic: str, kind: type[Cancel | Enqueue | Reschedule]) -> int:
        return self._store.batch_size(topic, kind)
