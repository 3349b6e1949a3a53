"""The definition of a schedule, its options, and the record under which a topic stores it.

The options are those of `schedule(...)`, the command line and YAML. A template is a body with
placeholders that each occurrence fills in.

A record is `fence SP json`. The fence, `version.tick.made_ms`, changes whenever the schedule
changes; scripts compare it with the one that their caller read. The JSON holds definition and
state.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, tzinfo
from enum import StrEnum
from string import Template
from typing import Any, Self, TypedDict, TypeVar

import msgspec

from lisa.core.model.clock import (
    checked_ttl_ms,
    datetime_ms,
    duration_ms,
    human,
    ms_datetime,
    named_duration,
    parse_moment,
    parse_zone,
    zone_name,
    zone_of,
)
from lisa.core.model.envelope import checked_headers, decode_body, encode_body, encode_headers
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.keys import (
    WINDOW_HEADER,
    check_key,
    check_own_id,
    keyed_id,
    plain_text,
)
from lisa.core.model.lanes import own_lane
from lisa.core.model.late import LatePolicy, message_policy
from lisa.core.model.recurring.calendar import first_instant, parse_cron
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.model.windows.placing import check_window

PLACEHOLDERS = frozenset({"tick", "tick_ms", "previous", "previous_ms", "count"})

MIN_EVERY_MS = 1_000
MIN_LATE_MS = 1_000
"""The shortest `max_late`: managers handle each tick some milliseconds late."""
MOST_CAUGHT_UP = 100
"""The most missed ticks that a schedule may catch up."""

MOST_OCCURRENCES = 10**12

SCHEDULE_HEADER, TICK_HEADER = "lisa-schedule", "lisa-tick"
_LONGEST_NAME = 200

E = TypeVar("E", bound=StrEnum)
LONGEST_CRON = 1_000
"""Characters of a pattern, which every look at its schedule parses."""

_ALL = re.compile(r"all\s*(?:\(\s*(?:max\s*=\s*)?([0-9]{1,4})\s*\))?")


def check_template(kind: str, body: str) -> None:
    """Raise InvalidMessage if a body of that kind is not a template, or names other values."""
    if kind == "b":
        raise InvalidMessage("a template is text or JSON, not bytes")
    template = Template(body)
    unknown = set(template.get_identifiers()) - PLACEHOLDERS
    if unknown or not template.is_valid():
        known = ", ".join(f"${{{name}}}" for name in sorted(PLACEHOLDERS))
        raise InvalidMessage(
            f"the template knows {known}, and $$ for a dollar sign; "
            f"{'unknown: ' + min(unknown) if unknown else 'a $ stands alone'}"
        )


def placeholders(zone: tzinfo, tick_ms: int, previous_ms: int | None, count: int) -> dict[str, Any]:
    """The values of one occurrence by the names of their placeholders."""

    def local(at_ms: int) -> str:
        return ms_datetime(at_ms).astimezone(zone).isoformat()

    return {
        "tick": local(tick_ms),
        "tick_ms": tick_ms,
        "previous": None if previous_ms is None else local(previous_ms),
        "previous_ms": previous_ms,
        "count": count,
    }


def filled(kind: str, body: bytes, values: dict[str, Any]) -> bytes:
    """A body with its placeholders filled in."""
    if kind == "s":
        return _text(body.decode(), values).encode()
    return msgspec.json.encode(_substituted(msgspec.json.decode(body), values))


def _substituted(value: Any, values: dict[str, Any]) -> Any:
    """A JSON value with its texts filled in; a text that is one placeholder becomes its value."""
    if isinstance(value, str):
        if value.startswith("${") and value.endswith("}") and value[2:-1] in values:
            return values[value[2:-1]]
        return _text(value, values)
    if isinstance(value, list):
        return [_substituted(item, values) for item in value]
    if isinstance(value, dict):
        return {key: _substituted(item, values) for key, item in value.items()}
    return value


def _text(text: str, values: dict[str, Any]) -> str:
    shown = {name: "" if value is None else value for name, value in values.items()}
    return Template(text).substitute(shown)


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
    policy and late policy. key, cost, slack_ms: of each occurrence.
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
    key: str | None = None
    cost: int | None = None
    slack_ms: int | None = None

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
    def message_policy(self) -> str | None:
        """The stored policies of each occurrence; None if it has none of its own."""
        slack = None if self.slack_ms is None else timedelta(milliseconds=self.slack_ms)
        return message_policy(self.policy, self.late, own_lane(self.cost, slack))

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

    def occurrence_id(self, name: str, tick_ms: int) -> str:
        """The message id of an occurrence."""
        return keyed_id(self.key, f"{name}@{tick_ms}")

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
    """The name of a schedule, or raise InvalidMessage. Its own message ids are `name@<tick>`."""
    if not isinstance(name, str) or not name.strip():
        raise InvalidMessage(f"the name of a schedule is text, not {name!r}")
    check_own_id(name)
    if len(name.encode()) > _LONGEST_NAME:
        raise InvalidMessage(f"the name of a schedule has at most {_LONGEST_NAME} bytes")
    return plain_text(name)


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


class ScheduleOptions(TypedDict, total=False):
    """The options of a schedule; see `Producer.schedule`."""

    cron: str | None
    every: timedelta | str | None
    tz: tzinfo | str | None
    dst: Dst | str
    start: datetime | str | None
    until: datetime | str | None
    count: int | None
    jitter: timedelta | str | None
    catch_up: CatchUp | str
    max_late: timedelta | str | None
    overlap: Overlap | str
    template: bool
    headers: Mapping[str, str] | None
    ttl: timedelta | str | None
    retry: RetryPolicy | Sequence[timedelta | str] | str | None
    late: LatePolicy | Mapping[str, timedelta | str] | str | None
    key: str | None
    cost: int | None
    slack: timedelta | str | None


def define(
    body: object, options: ScheduleOptions, zone: tzinfo | str | None = None
) -> ScheduleDefinition:
    """The checked definition. Raises InvalidMessage, and TypeError for an unknown option.

    zone: the time zone if the options name none; None means UTC.
    """
    known = ScheduleOptions.__annotations__.keys()
    if unknown := sorted(options.keys() - known):
        raise TypeError(
            f"a schedule got an unexpected option {unknown[0]!r}; its options are "
            f"{', '.join(known)}"
        )
    named_zone = options.get("tz")
    name = zone_name(named_zone if named_zone is not None else zone)
    catch_up, most = _catch_up(options.get("catch_up", CatchUp.ONE))
    kind, text = stored_body(body)
    retry, late, ttl = options.get("retry"), options.get("late"), options.get("ttl")
    key, slack = options.get("key"), options.get("slack")
    own_lane(options.get("cost"), slack)  # raises InvalidMessage
    headers = checked_headers(options.get("headers"))
    if WINDOW_HEADER in headers:
        check_window(headers[WINDOW_HEADER], headers)
    every_ms = _ms("every", options.get("every"))
    if every_ms == 0 and options.get("cron") is None:  # 0 means none in a record
        raise InvalidMessage("every=0 is too short; it is at least 1s")
    return ScheduleDefinition(
        cron=_pattern(options.get("cron")),
        every_ms=every_ms or 0,
        tz=name,
        dst=_choice("dst", Dst, options.get("dst", Dst.VIXIE)),
        start_ms=_instant("start", options.get("start"), name),
        until_ms=_instant("until", options.get("until"), name),
        most=_count(options.get("count")),
        jitter_ms=_ms("jitter", options.get("jitter")) or 0,
        catch_up=catch_up,
        max_caught_up=most,
        max_late_ms=_ms("max_late", options.get("max_late")),
        overlap=_choice("overlap", Overlap, options.get("overlap", Overlap.ALLOW)),
        kind=kind,
        body=text,
        template=_flag("template", options.get("template", False)),
        headers=headers,
        ttl_ms=None if ttl is None else checked_ttl_ms(ttl),
        policy=None if retry is None else RetryPolicy.parse(retry).encode(),
        late=None if late is None else LatePolicy.parse(late).encode(),
        key=None if key is None else check_key(key),
        cost=options.get("cost"),
        slack_ms=_ms("slack", slack),
    ).check()


def _pattern(cron: object) -> str:
    if cron is None:
        return ""
    if not isinstance(cron, str) or not cron.strip():
        raise InvalidMessage(f"cron is text, as in '0 9 * * 1-5', not {cron!r}")
    if len(cron) > LONGEST_CRON:
        raise InvalidMessage(f"cron has at most {LONGEST_CRON:,} characters, not {len(cron):,}")
    return " ".join(cron.split())


def _count(count: object) -> int | None:
    if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
        raise InvalidMessage(f"count is a number, not {count!r}")
    return count


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidMessage(f"{name} is true or false, not {value!r}")
    return value


def _ms(name: str, value: timedelta | str | None) -> int | None:
    return None if value is None else duration_ms(named_duration(name, value))


def _instant(name: str, moment: datetime | str | None, zone: str) -> int | None:
    """Epoch ms of a moment; a naive one is in the schedule's zone. Raises InvalidMessage."""
    if moment is None:
        return None
    if not isinstance(moment, datetime):
        try:
            moment = parse_moment(moment)
        except InvalidMessage as error:
            raise InvalidMessage(f"{name}: {error}") from None
    instant_ms = datetime_ms(moment, parse_zone(zone))
    try:
        ms_datetime(instant_ms).astimezone(parse_zone(zone))  # it is shown like this
    except OverflowError:
        raise InvalidMessage(f"{name}={moment.isoformat()} is out of range") from None
    return instant_ms


def _choice(name: str, kind: type[E], value: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise InvalidMessage(f"{name} is one of {', '.join(kind)}, not {value!r}") from None


def _catch_up(value: str) -> tuple[CatchUp, int]:
    """The policy and its maximum from `none`, `one`, `all` or `all(max=20)`."""
    found = _ALL.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if found:
        return CatchUp.ALL, int(found[1] or MOST_CAUGHT_UP)
    try:
        return CatchUp(value), MOST_CAUGHT_UP
    except ValueError:
        raise InvalidMessage(f"catch_up is none, one, all or all(max=n), not {value!r}") from None
