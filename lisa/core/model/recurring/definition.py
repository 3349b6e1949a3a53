"""The definition of a schedule, and the record under which a topic stores it.

A record is `fence SP json`. The fence, `version.tick.made_ms`, changes whenever the schedule
changes; scripts compare it with the one that their caller read. The JSON holds definition and
state.
"""

from __future__ import annotations

import base64
import hashlib
from enum import StrEnum
from typing import Any, Self

import msgspec

from lisa.core.model.clock import human, zone_of
from lisa.core.model.envelope import decode_body, encode_body, encode_headers
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.keys import check_id, plain_text
from lisa.core.model.recurring.calendar import first_instant
from lisa.core.model.recurring.grammar import parse_cron
from lisa.core.model.recurring.template import check_template, filled, placeholders

MIN_EVERY_MS = 1_000
MIN_LATE_MS = 1_000
"""The shortest `max_late`: managers handle each tick some milliseconds late."""
MOST_CAUGHT_UP = 100
"""The most missed ticks that a schedule may catch up."""

MOST_OCCURRENCES = 10**12

SCHEDULE_HEADER, TICK_HEADER = "lisa-schedule", "lisa-tick"
_LONGEST_NAME = 200


class CatchUp(StrEnum):
    """What to do with ticks missed while no manager ran: drop, run the newest, run all."""

    NONE = "none"
    ONE = "one"
    ALL = "all"


class Overlap(StrEnum):
    """What a tick does while an earlier occurrence is unfinished; see how-to/recurring.md."""

    ALLOW = "allow"
    SKIP = "skip"
    QUEUE_ONE = "queue_one"
    REPLACE_UNSTARTED = "replace_unstarted"


class Dst(StrEnum):
    """When a wall time that the clock change skips fires: right after the gap, or not at all."""

    VIXIE = "vixie"
    SKIP = "skip"


class ScheduleDefinition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What users define. Durations are in ms, instants in epoch ms; has either cron or every_ms.

    body is text: JSON (kind "j"), a string ("s") or base64 ("b"). policy, late: an encoded retry
    policy and late policy.
    """

    cron: str = ""
    every_ms: int = 0
    tz: str = "UTC"
    dst: Dst = Dst.VIXIE
    start_ms: int | None = None
    until_ms: int | None = None
    most: int | None = msgspec.field(name="count", default=None)
    jitter_ms: int = 0
    catch_up: CatchUp = CatchUp.ONE
    max_caught_up: int = MOST_CAUGHT_UP
    max_late_ms: int | None = None
    overlap: Overlap = Overlap.ALLOW
    kind: str = "j"
    body: str = "null"
    template: bool = False
    headers: dict[str, str] = {}
    ttl_ms: int | None = None
    policy: str | None = None
    late: str | None = None

    def check(self) -> Self:
        """Return the definition. Raises InvalidMessage, which names the parameter and the fix."""
        self._check_times()
        late_ms = self.max_late_ms
        if late_ms is not None and late_ms < MIN_LATE_MS:
            raise InvalidMessage(f"max_late={human(late_ms)} is too short; it is at least 1s")
        if self.most is not None and self.most < 1:
            raise InvalidMessage(f"count={self.most} is less than 1; omit it for no limit")
        if self.most is not None and self.most > MOST_OCCURRENCES:
            raise InvalidMessage(f"count is at most {MOST_OCCURRENCES:,}; omit it for no limit")
        if not 1 <= self.max_caught_up <= MOST_CAUGHT_UP:
            raise InvalidMessage(f"catch_up: max is 1 to {MOST_CAUGHT_UP}")
        reserved = {SCHEDULE_HEADER, TICK_HEADER} & self.headers.keys()
        if reserved:
            raise InvalidMessage(f"the header {min(reserved)!r} is set by the schedule")
        encode_headers(self.headers)
        if self.template:
            check_template(self.kind, self.body)
        return self

    def _check_times(self) -> None:
        if bool(self.cron) == bool(self.every_ms):
            raise InvalidMessage("a schedule needs exactly one of cron and every")
        zone = zone_of(self.tz)
        if self.cron:
            try:
                pattern = parse_cron(self.cron)
            except ConfigError as error:
                raise InvalidMessage(str(error)) from None
            if first_instant(pattern, zone, skips=self.dst is Dst.SKIP) is None:
                raise InvalidMessage(f"cron {self.cron!r} never ticks: no year has such a day")
        elif self.every_ms < MIN_EVERY_MS:
            raise InvalidMessage(f"every={human(self.every_ms)} is too short; it is at least 1s")
        if self.overlap is Overlap.REPLACE_UNSTARTED and self.jitter_ms >= self.every_ms > 0:
            raise InvalidMessage(
                f"jitter={human(self.jitter_ms)} is not shorter than every={human(self.every_ms)}: "
                "with overlap='replace_unstarted' an occurrence could be replaced before it is due"
            )
        start, until = self.start_ms, self.until_ms
        if start is not None and until is not None and until < start:
            raise InvalidMessage("until is before start")

    @property
    def rule(self) -> str:
        """The pattern, or the interval in words."""
        return self.cron or f"every {human(self.every_ms)}"

    @property
    def encoded_body(self) -> bytes:
        """The body, or its template, as bytes."""
        return base64.b64decode(self.body) if self.kind == "b" else self.body.encode()

    @property
    def is_ahead(self) -> bool:
        """Whether an occurrence is created ahead of its tick.

        Otherwise it is created at its tick, because the policies depend on the state at that time.
        """
        is_unlimited = self.catch_up is not CatchUp.NONE and self.max_late_ms is None
        return self.overlap is Overlap.ALLOW and is_unlimited

    @property
    def fingerprint(self) -> str:
        """Identifies the definition."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]

    def body_at(self, name: str, tick_ms: int, previous_ms: int | None, count: int) -> bytes:
        """An occurrence's envelope without its head: kind, headers, body. Raises InvalidMessage."""
        headers = {**self.headers, SCHEDULE_HEADER: name, TICK_HEADER: str(tick_ms)}
        body = self.encoded_body
        if self.template:
            zone = zone_of(self.tz)
            values = placeholders(zone, tick_ms, previous_ms, count)
            body = filled(self.kind, body, values)
        return self.kind.encode() + encode_headers(headers) + body


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A definition with its state.

    tick: the next tick, or the one whose turn it is; None if none is left. is_made: its message
    exists. made_ms: when the schedule was created. made: occurrences created so far. last: the tick
    of the latest, without the one that exists ahead of its tick. earlier: ticks of the latest
    occurrences, if overlaps matter. is_queued: the tick waits for the end of an earlier occurrence.
    declared: fingerprint of the definition that a manager's YAML wrote last.
    """

    version: int = 0
    tick: int | None = None
    made_ms: int = 0
    definition: ScheduleDefinition = msgspec.field(name="d")
    is_made: bool = msgspec.field(name="a", default=False)
    is_paused: bool = msgspec.field(name="p", default=False)
    is_queued: bool = msgspec.field(name="q", default=False)
    made: int = msgspec.field(name="n", default=0)
    last: int | None = msgspec.field(name="l", default=None)
    earlier: tuple[int, ...] = msgspec.field(name="e", default=())
    declared: str = msgspec.field(name="y", default="")

    @property
    def latest(self) -> int | None:
        """The tick of the latest occurrence, also of one ahead of its tick; None if none exists."""
        return self.tick if self.is_made else self.last

    @property
    def fence(self) -> str:
        """What a script compares before it changes the schedule."""
        tick = "" if self.tick is None else self.tick
        queued = "q" if self.is_queued else ""
        return f"{self.version}.{tick}{queued}.{self.made_ms}"

    def encode(self) -> bytes:
        """The stored form."""
        state = msgspec.structs.replace(self, version=0, tick=None, made_ms=0)
        return self.fence.encode() + b" " + msgspec.json.encode(state)

    @staticmethod
    def decode(stored: bytes) -> Record:
        """The reverse of `encode`. Raises InvalidMessage."""
        try:
            fence, _, rest = stored.partition(b" ")
            version, tick, made_ms = fence.decode().split(".")
            tick = tick.removesuffix("q")
            record = _record_decoder.decode(rest)
            return msgspec.structs.replace(
                record,
                version=int(version),
                tick=int(tick) if tick else None,
                made_ms=int(made_ms),
            )
        except (ValueError, msgspec.DecodeError) as error:
            raise InvalidMessage(f"the record of a schedule cannot be read: {error}") from None


# Created at import: msgspec crashes if several threads prepare the decoder of one type at once.
_record_decoder = msgspec.json.Decoder(Record)


def check_name(name: str) -> str:
    """The name of a schedule, or raise InvalidMessage. Its message ids are `name@<tick>`."""
    if not isinstance(name, str) or not name.strip():
        raise InvalidMessage(f"the name of a schedule is text, not {name!r}")
    check_id(name)
    if len(name.encode()) > _LONGEST_NAME:
        raise InvalidMessage(f"the name of a schedule has at most {_LONGEST_NAME} bytes")
    return plain_text(name)


def occurrence_id(name: str, tick_ms: int) -> str:
    """The message id of an occurrence."""
    return f"{name}@{tick_ms}"


def stored_body(body: object) -> tuple[str, str]:
    """A body as the fields kind and body of a definition. Raises InvalidMessage."""
    kind, encoded = encode_body(body)
    if kind == b"b":
        return "b", base64.b64encode(encoded).decode()
    return kind.decode(), encoded.decode()


def body_of(definition: ScheduleDefinition) -> Any:
    """The body as it was given."""
    if definition.kind == "b":
        return definition.encoded_body
    return decode_body(definition.kind, definition.encoded_body)
