"""Topic options, stored in Redis so that all roles and client languages agree.

The topic's `options` hash holds them under the field names of `TopicOptions`. Durations are stored
as integer milliseconds, a retry policy in its encoded form, `paused` and `journal` as "1" (any
other value is false). An absent or empty `capacity` is unlimited. An absent field has its default.
A group's own value of an option of lanes is in the field `<option>@<group>`.

`TopicOptions` is the only list of options: the YAML keys, the HTTP models, the help, the defaults
in scripts, and the reference are derived from it.
"""

# ruff: noqa: D102 - OptionType documents the methods of its subclasses
# ruff: noqa: RUF009 - `_option` returns the specification of a field

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from enum import StrEnum
from itertools import groupby
from typing import Any, ClassVar, Self, TypeVar

from lisa.core.model.clock import duration_ms, exact, human, in_one_unit, parse_duration
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.keys import check_group
from lisa.core.model.lanes import MAX_SLACK, KeyOrder, Rate
from lisa.core.model.late import MIN_AFTER, LatePolicy, Ramp
from lisa.core.model.retry_policy import DEFAULT_POLICY, MAX_DELAY, RetryPolicy
from lisa.core.model.sharding import MOST_SHARDS

_WHOLE = re.compile(r"[0-9]{1,18}|[0-9]{1,3}(,[0-9]{3}){1,5}")

T = TypeVar("T")

GRACE = timedelta(seconds=10)
"""How long running handlers and requests may take to finish when their role stops. Container
platforms kill a process 10 to 30 s after asking it to stop."""

PRODUCER_RETRY_TIME = timedelta(seconds=10)
"""Total time for which a producer repeats a call whose reply was lost."""

MIN_RETENTION = 2 * PRODUCER_RETRY_TIME
MIN_ACK_TIMEOUT = timedelta(milliseconds=100)
MAX_ACK_TIMEOUT = timedelta(days=30)
LARGEST_BODY_BYTES = 256 * 1024 * 1024
HEAVY_BODY_BYTES = 8 * 1024 * 1024
"""Larger bodies are accepted with a warning, because a single one makes a call take too long."""

LARGEST_COUNT = 10**12
MOST_GROUPS = 1_000

PLACE_BYTES = 40
"""The length of a place, which a parked message has in its lane; see lua/prelude/lanes.lua."""

LARGEST_BATCH = 250
"""Maximum number of messages promoted per call."""

LARGEST_WINDOW = 50
"""Maximum number of pending entries and leases that one reclaimer call checks."""

BYTES_PER_CALL = 256 * 1024
"""Maximum bytes of bodies that one call reads or writes, unless a single body is larger.

Measured: a call of this size takes the server an additional 0.5 to 1 ms.
"""

CARRIED_BYTES = 2_500
"""Longest envelope that a stream entry carries.

Measured at 1,000 messages a second with bodies of 2 kB: Redis and consumer save a tenth of their
time, and the median lateness falls by a fifth.
"""

CARRIED_ENTRIES = 64
"""In longer streams, entries carry no envelopes: the consumers are behind and open many at once."""

MIN_LATE_MS = int(MIN_AFTER.total_seconds() * 1000)
"""No late policy or ramp applies to messages less late than this."""

RAMP_LATE_MS = 10_000
"""A ramp limits messages later than this: the backlog of an outage, not of a failover."""

HANDLER_SUFFIX = "-h"
"""Ends the names of consumers that announce when the handler of a suspect begins."""

BEGUN = 2
"""The delivery count of a pending entry whose handler is known to have begun."""

SUSPECT_REASON = "ack timeout during its handler"
"""Why an announced handler of a suspect failed; at its retry the message is a suspect again."""


class OptionType(ABC):
    """How values of one type are checked, stored and shown."""

    @property
    @abstractmethod
    def bounds(self) -> str:
        """The valid values, for help and reference."""

    @abstractmethod
    def encode(self, value: object) -> str:
        """Validate a typed value or text; returns its form in the hash. Raises InvalidMessage."""

    @abstractmethod
    def decode(self, text: str) -> object:
        """The reverse of `encode`. Raises ValueError or OverflowError."""

    def plain(self, value: Any) -> Any:
        """A JSON value that `encode` accepts again."""
        return value

    @abstractmethod
    def show(self, value: Any) -> str:
        """Text for people, which `encode` accepts again."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DurationType(OptionType):
    """A duration from `low` to `high`; with `or_zero` also 0. Stored in milliseconds."""

    low: timedelta
    high: timedelta
    or_zero: bool = False

    @property
    def bounds(self) -> str:
        zero = "0, or " if self.or_zero else ""
        return f"{zero}{human(duration_ms(self.low))} to {human(duration_ms(self.high))}"

    def encode(self, value: object) -> str:
        duration = parse_duration(value)
        if not (self.low <= duration <= self.high or (self.or_zero and not duration)):
            shown = human(duration_ms(duration))
            raise InvalidMessage(f"{shown} is out of range; write {self.bounds}")
        return str(duration_ms(duration))

    def decode(self, text: str) -> timedelta:
        return timedelta(milliseconds=int(text))

    def plain(self, value: timedelta) -> str:
        return in_one_unit(duration_ms(value))

    def show(self, value: timedelta) -> str:
        return exact(duration_ms(value))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CountType(OptionType):
    """A whole number from 1 to `highest`. With `or_unlimited` also None, stored as ""."""

    highest: int
    or_unlimited: bool = False

    @property
    def bounds(self) -> str:
        return f"1 to {self.highest:,}" + (", or unlimited" if self.or_unlimited else "")

    def encode(self, value: object) -> str:
        if self.or_unlimited and (value is None or value in ("", "none", "unlimited")):
            return ""
        if isinstance(value, str) and _WHOLE.fullmatch(value):
            value = int(value.replace(",", ""))
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= self.highest:
            rest = " or 'unlimited'" if self.or_unlimited else ""
            raise InvalidMessage(f"{value!r} is not a whole number from 1 to {self.highest}{rest}")
        return str(value)

    def decode(self, text: str) -> int | None:
        return None if self.or_unlimited and not text else int(text)

    def plain(self, value: int | None) -> int | str:
        return "unlimited" if value is None else value

    def show(self, value: int | None) -> str:
        return "unlimited" if value is None else f"{value:,}"


class FlagType(OptionType):
    """True or false, stored as "1" or "0"; any other stored text is false."""

    bounds = "yes or no"

    def encode(self, value: object) -> str:
        text = str(value).lower()
        if text in ("true", "1", "yes", "on"):
            return "1"
        if text in ("false", "0", "no", "off"):
            return "0"
        raise InvalidMessage(f"{value!r} is neither true nor false")

    def decode(self, text: str) -> bool:
        return text == "1"

    def show(self, value: bool) -> str:  # noqa: FBT001 - a value, not a switch
        return "yes" if value else "no"


class WindowType(OptionType):
    """A window as text, or None, stored as ""."""

    bounds = "a window, or none"

    def encode(self, value: object) -> str:
        if value is None or value in ("", "none"):
            return ""
        # Late: few topics have a window.
        from lisa.core.model.windows.placing import check_window

        return check_window(value)

    def decode(self, text: str) -> str | None:
        return text or None

    def plain(self, value: str | None) -> str:
        return value or "none"

    def show(self, value: str | None) -> str:
        return value or "none"


class PolicyType(OptionType):
    """A retry policy, stored in its encoded form."""

    bounds = "a retry policy"

    def encode(self, value: object) -> str:
        return RetryPolicy.parse(value).encode()

    def decode(self, text: str) -> RetryPolicy:
        return RetryPolicy.decode(text)

    def plain(self, value: RetryPolicy) -> str:
        return str(value)

    def show(self, value: RetryPolicy) -> str:
        runs = [(ms, sum(1 for _ in same)) for ms, same in groupby(value.delays_ms)]
        pauses = ", ".join(exact(ms) if n == 1 else f"{n} x {exact(ms)}" for ms, n in runs)
        return (pauses or "none") + (f", jitter {value.jitter!r}" if value.jitter else "")


class _TextType(OptionType):
    """A value that is None, stored as "", or of a class with `parse`, `encode` and `decode`."""

    kind: ClassVar[type[LatePolicy | Ramp | Rate]]

    def encode(self, value: object) -> str:
        return "" if value in (None, "", "none") else self.kind.parse(value).encode()

    def decode(self, text: str) -> LatePolicy | Ramp | Rate | None:
        return self.kind.decode(text) if text else None

    def plain(self, value: LatePolicy | Ramp | Rate | None) -> str:
        return self.show(value)

    def show(self, value: LatePolicy | Ramp | Rate | None) -> str:
        return "none" if value is None else str(value)


class LateType(_TextType):
    """A late policy, or None."""

    kind = LatePolicy
    bounds = "run, skip, garbage or collapse, then `after` and 1s or more; or none"


class RampType(_TextType):
    """A ramp, or None."""

    kind = Ramp
    bounds = "messages per s, m or h, and perhaps `newest first`; or none"


class RateType(_TextType):
    """A rate, or None."""

    kind = Rate
    bounds = (
        "messages per s, m, h or d, or per a duration, and perhaps `burst` and a count; or none"
    )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ChoiceType(OptionType):
    """One of several words, or None, stored as ""."""

    choices: type[StrEnum]

    @property
    def bounds(self) -> str:
        return f"none, {' or '.join(self.choices)}"

    def encode(self, value: object) -> str:
        if value in (None, "", "none"):
            return ""
        if value not in tuple(self.choices):
            raise InvalidMessage(f"{value!r} is not valid; write {self.bounds}")
        return str(value)

    def decode(self, text: str) -> StrEnum | None:
        return self.choices(text) if text else None

    def plain(self, value: StrEnum | None) -> str:
        return self.show(value)

    def show(self, value: StrEnum | None) -> str:
        return value.value if value else "none"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Option:
    """Describes one topic option, except for its name.

    kind: checks, stores and shows values.
    text: the meaning, for help and reference.
    is_in_yaml: whether a manager's YAML can set it.
    yaml_name: its name there, if different.
    unset: what applies if YAML leaves it out; "" means the default.
    example: a value for the example file; if "", the file shows the default.
    """

    default: Any
    kind: OptionType
    text: str
    is_in_yaml: bool = True
    yaml_name: str = ""
    unset: str = ""
    example: str = ""


def _option(*, default: T, **rest: Any) -> T:
    option = Option(default=default, **rest)
    return field(default=default, metadata={"option": option})


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicOptions:
    """The options of one topic; `OPTIONS` describes each."""

    ack_timeout: timedelta = _option(
        default=timedelta(seconds=10),
        kind=DurationType(MIN_ACK_TIMEOUT, MAX_ACK_TIMEOUT),
        text="How long a delivery may stay unsettled before a manager reclaims it (visibility "
        "timeout). Running consumers extend it.",
        unset="`manager-server.timeout`",
        example="30s",
    )
    retry_delays: RetryPolicy = _option(
        default=DEFAULT_POLICY,
        kind=PolicyType(),
        text="The pause before each retry (back-off); the number of pauses is the number of "
        "retries.",
        unset="the retries of `manager-server`",
        example="0,2m,10m",
    )
    max_ready: int = _option(
        default=10_000,
        kind=CountType(LARGEST_COUNT),
        text="Maximum unread entries in a group's ready stream. Further due messages wait; nothing "
        "is dropped.",
        yaml_name="max_length",
    )
    promote_interval: timedelta = _option(
        default=timedelta(0),
        kind=DurationType(timedelta(milliseconds=1), timedelta(seconds=1), or_zero=True),
        text="How long a manager waits after a promotion before it promotes more messages. A "
        "longer interval costs less CPU per message and adds as much lateness. With 0, it promotes "
        "each message when it is due; above 1,500 messages per second it promotes every 2 ms.",
        example="2ms",
    )
    capacity: int | None = _option(
        default=None,
        kind=CountType(LARGEST_COUNT, or_unlimited=True),
        text="Maximum live messages, garbage excluded; a send beyond it is refused (`TopicFull`).",
        example="1000000",
    )
    retention: timedelta = _option(
        default=timedelta(seconds=60),
        kind=DurationType(MIN_RETENTION, MAX_DELAY, or_zero=True),
        text="How long settled ids are remembered for deduplication. With 0, a repeated send may "
        "add a settled message again.",
    )
    dedupe_for: timedelta = _option(
        default=timedelta(days=1),
        kind=DurationType(MIN_RETENTION, MAX_DELAY),
        text="Retention of messages sent by `lisa pipeline schedule`, whose jobs may run again.",
    )
    garbage_keep: timedelta = _option(
        default=timedelta(days=90),
        kind=DurationType(timedelta(milliseconds=1), MAX_DELAY),
        text="How long garbage (the dead-letter list) is kept before a manager purges it.",
    )
    window: str | None = _option(
        default=None,
        kind=WindowType(),
        text="When messages may be handed over, as in `mon-fri 9-17; tz=Europe/Berlin`. Outside "
        "these hours they move to the next opening.",
        example="mon-sat 8-20; not holidays DE; tz=@timezone|Europe/Berlin",
    )
    journal: bool = _option(
        default=False,
        kind=FlagType(),
        text="Record every transition in the topic's journal, which `lisa pipeline` archives.",
    )
    journal_max: int = _option(
        default=1_000_000,
        kind=CountType(LARGEST_COUNT),
        text="Maximum events in the journal while no archive reads it; the oldest are trimmed "
        "first.",
    )
    max_body_bytes: int = _option(
        default=1_048_576,
        kind=CountType(LARGEST_BODY_BYTES),
        text="Maximum size of an encoded body, in bytes.",
    )
    max_groups: int = _option(
        default=100,
        kind=CountType(MOST_GROUPS),
        text="Maximum number of groups; each receives every message. A further group is refused "
        "(`TooManyGroups`).",
    )
    shards: int = _option(
        default=1,
        kind=CountType(MOST_SHARDS),
        text="Number of shards, each with its own key tag, which spread a hot topic over the nodes "
        "of a cluster.",
    )
    late: LatePolicy | None = _option(
        default=None,
        kind=LateType(),
        text="What happens to messages that are late at their first promotion: run, skip, garbage, "
        "or collapse (only the newest late occurrence of a schedule runs).",
        example="skip after 10m",
    )
    ramp: Ramp | None = _option(
        default=None,
        kind=RampType(),
        text="The rate at which all managers together promote messages that are more than 10 s "
        "late, the oldest first unless `newest first` follows. Messages on time are not limited.",
        example="200/s",
    )
    rate: Rate | None = _option(
        default=None,
        kind=RateType(),
        text="The rate at which a group starts messages, over all consumers. `burst` is how many "
        "may start at once after a pause.",
        example="100/s, burst 20",
    )
    key_rate: Rate | None = _option(
        default=None,
        kind=RateType(),
        text="The rate at which a group starts messages of the same key.",
        example="2/s",
    )
    concurrency: int | None = _option(
        default=None,
        kind=CountType(LARGEST_COUNT, or_unlimited=True),
        text="Maximum messages of a group that are ready or in flight at once, over all consumers.",
        example="100",
    )
    key_concurrency: int | None = _option(
        default=None,
        kind=CountType(LARGEST_COUNT, or_unlimited=True),
        text="Maximum messages of the same key that are ready or in flight at once in a group.",
        example="1",
    )
    order: KeyOrder | None = _option(
        default=None,
        kind=ChoiceType(KeyOrder),
        text="Whether a group handles the messages of a key one at a time, in the order of their "
        "due times; retries keep their place. After a message is dead, `continue` goes on with the "
        "next one; `hold` waits until the dead message is requeued, cancelled or purged.",
        example="continue",
    )
    fair: bool = _option(
        default=False,
        kind=FlagType(),
        text="Start the due messages of a group's keys in turn, so that a key with many messages "
        "does not delay the others.",
    )
    slack: timedelta = _option(
        default=timedelta(0),
        kind=DurationType(timedelta(milliseconds=1), MAX_SLACK, or_zero=True),
        text="How much later than due a message may start without harm. Where messages have to "
        "wait, those with the earliest due time plus slack come first; a message may have its own.",
        example="5m",
    )
    max_per_key: int | None = _option(
        default=None,
        kind=CountType(LARGEST_COUNT, or_unlimited=True),
        text="Maximum live messages of the same key, garbage included; a send beyond it is refused "
        "(`KeyFull`).",
        example="1000",
    )
    paused: bool = _option(
        default=False,
        kind=FlagType(),
        text="While a topic is paused, nothing is promoted, read or pulled; deliveries in flight "
        "finish.",
        is_in_yaml=False,
    )

    @classmethod
    def from_hash(
        cls, stored: Mapping[bytes, bytes] | Mapping[str, str], group: str | None = None
    ) -> Self:
        """Read the `options` hash; keys and values may be bytes or str.

        group: whose own values replace those of the topic. Unknown fields are ignored. Raises
        ConfigError, which names the unreadable field.
        """
        texts = {_text(key): _text(raw) for key, raw in stored.items()}
        values = {name: _decoded(name, text) for name, text in texts.items() if name in OPTIONS}
        if group is not None:
            values |= group_options(texts).get(group, {})
        return cls(**values)


def group_options(
    stored: Mapping[bytes, bytes] | Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """The values that groups have of their own, by group and option, from the `options` hash.

    Raises ConfigError, which names the unreadable field.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, raw in stored.items():
        field_name = _text(key)
        name, _, group = field_name.partition(OF_GROUP)
        if group and name in LANE_OPTIONS:
            found.setdefault(group, {})[name] = _decoded(field_name, _text(raw))
    return found


def _decoded(field_name: str, text: str) -> Any:
    try:
        return OPTIONS[field_name.partition(OF_GROUP)[0]].kind.decode(text)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"the stored topic option {field_name} is unreadable: {text!r}; set it again"
        ) from None


OPTIONS: dict[str, Option] = {
    option.name: option.metadata["option"] for option in fields(TopicOptions)
}
"""All topic options by name, in the order of the reference."""

LANE_OPTIONS = ("rate", "key_rate", "concurrency", "key_concurrency", "order", "fair", "slack")
"""The options for which a topic uses lanes. A group may have its own values of these."""

OF_GROUP = "@"
"""Between the name of an option and the group whose own value a field of the hash has."""


def encode(options: Mapping[str, object]) -> dict[str, str]:
    """Validate a partial mapping of options and encode it for the hash.

    Names may be in kebab-case; `key_rate@fast` is the value of group `fast` alone. Values are those
    of `TopicOptions`, or text as on a command line (`"30s"`, `"0,2m"`, `"500"`, `"unlimited"`,
    `"true"`). An unlimited capacity becomes "", and `paused=False` becomes "0". Raises ConfigError,
    which names the option, the value and the fix.
    """
    encoded: dict[str, str] = {}
    for given, value in options.items():
        stored_name = field_of(str(given))
        if stored_name in encoded:
            raise ConfigError(f"topic option {stored_name} is given twice")
        try:
            encoded[stored_name] = OPTIONS[stored_name.partition(OF_GROUP)[0]].kind.encode(value)
        except InvalidMessage as error:
            raise ConfigError(f"topic option {given}: {error}") from None
    return encoded


def field_of(given: str, group: str | None = None) -> str:
    """The field of the hash with an option that may be in kebab-case. Raises ConfigError.

    group: whose own value is meant; `given` may instead end in `@` and the group.
    """
    name, of_group, named = given.partition(OF_GROUP)
    name = name.replace("-", "_")
    if name not in OPTIONS:
        raise ConfigError(_unknown(name if of_group else given))
    if of_group:
        group = named
    if group is None:
        return name
    if name not in LANE_OPTIONS:
        raise ConfigError(
            f"topic option {name} applies to all groups; "
            f"a group may have its own {', '.join(LANE_OPTIONS)}"
        )
    try:
        return f"{name}{OF_GROUP}{check_group(group)}"
    except InvalidMessage as error:
        raise ConfigError(f"topic option {given}: {error}") from None


def warning(topic: str, encoded: Mapping[str, str | None]) -> str | None:
    """A warning about these encoded options, or None."""
    size = int(encoded.get("max_body_bytes") or 0)
    if size <= HEAVY_BODY_BYTES:
        return None
    return (
        f"topic {topic!r} accepts bodies of up to {size} bytes (max_body_bytes): sending or "
        f"reading a body above {HEAVY_BODY_BYTES} bytes blocks the server for 5 ms or more; "
        "store large content elsewhere and send a reference"
    )


def _unknown(given: str) -> str:
    import difflib  # late: only for this error

    near = difflib.get_close_matches(given.replace("-", "_").lower(), OPTIONS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(OPTIONS)}"
    return f"there is no topic option {given!r}; {hint}"


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
