"""Topic options: what Redis holds about a topic, so that all roles and languages agree.

They live in the topic's `options` hash under the names of `TopicOptions`' fields. Durations are
integer milliseconds there, a retry policy is its encoded form, `paused` and `journal` are "1"
(anything else is no), and an absent or empty `capacity` is unlimited. An absent field has its
default.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

from lisa.core.clock import duration_ms, human, parse_duration
from lisa.core.errors import ConfigError, InvalidMessage
from lisa.core.retry_policy import DEFAULT_POLICY, MAX_DELAY, RetryPolicy
from lisa.core.shards import MOST_SHARDS

PRODUCER_RETRY_TIME = timedelta(seconds=10)
"""How long a producer repeats one call whose reply was lost, all attempts together."""

MIN_RETENTION = 2 * PRODUCER_RETRY_TIME
MIN_ACK_TIMEOUT = timedelta(milliseconds=100)
MAX_ACK_TIMEOUT = timedelta(days=30)
LARGEST_BODY_BYTES = 256 * 1024 * 1024
LARGEST_COUNT = 10**12


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicOptions:
    """The options of one topic.

    ack_timeout: how long a delivery may stay unsettled before it is taken back.
    retry_delays: the pauses before each retry; their number is the number of retries.
    max_ready: unread entries that a group's ready stream may hold; what is due beyond waits.
    capacity: live messages that the topic takes before a send is refused; None is unlimited.
    retention: how long a settled id is remembered. 0 remembers nothing: a send repeated after its
        message was settled is then a new message.
    dedupe_for: the same for messages that the pipeline scheduled: its jobs may be run again.
    garbage_keep: how long garbage is kept before it is purged.
    journal: every transition of a message is also written down in the topic's journal.
    journal_max: events that the journal keeps where no archive has taken them yet.
    max_body_bytes: the largest encoded body.
    shards: the number of places, each with a key tag of its own, that new messages are spread over.
    paused: nothing is promoted, read or pulled; what is in flight finishes.
    """

    ack_timeout: timedelta = timedelta(seconds=10)
    retry_delays: RetryPolicy = DEFAULT_POLICY
    max_ready: int = 10_000
    capacity: int | None = None
    retention: timedelta = timedelta(seconds=60)
    dedupe_for: timedelta = timedelta(days=1)
    garbage_keep: timedelta = timedelta(days=90)
    journal: bool = False
    journal_max: int = 1_000_000
    max_body_bytes: int = 1_048_576
    shards: int = 1
    paused: bool = False

    @classmethod
    def from_hash(cls, stored: Mapping[bytes, bytes] | Mapping[str, str]) -> Self:
        """Read the `options` hash; keys and values may be bytes or str.

        Fields of other versions are passed over. `ConfigError` names a field that a foreign hand
        made unreadable.
        """
        values: dict[str, Any] = {}
        for key, raw in stored.items():
            name, text = _text(key), _text(raw)
            if name not in _CODECS:
                continue
            try:
                values[name] = _CODECS[name].decode(text)
            except (ValueError, OverflowError):
                raise ConfigError(
                    f"the stored topic option {name} is unreadable: {text!r}; set it again"
                ) from None
        return cls(**values)


@dataclass(frozen=True, slots=True)
class _Codec:
    """How one option is checked and written (`encode`), and read back (`decode`)."""

    encode: Callable[[object], str]
    decode: Callable[[str], object]


def encode(options: Mapping[str, object]) -> dict[str, str]:
    """Check a partial mapping of options and put it into the form of the hash.

    Names may be written in kebab-case; values are those of `TopicOptions`, or text as on a
    command line (`"30s"`, `"0,2m"`, `"500"`, `"unlimited"`, `"true"`). An unlimited capacity
    becomes "", not paused becomes "0". Raises `ConfigError` that names option, value and cure.
    """
    encoded: dict[str, str] = {}
    for given, value in options.items():
        name = str(given).replace("-", "_")
        if name not in _CODECS:
            raise ConfigError(_unknown(str(given)))
        if name in encoded:
            raise ConfigError(f"topic option {name} is given twice")
        try:
            encoded[name] = check_option(name, value)
        except InvalidMessage as error:
            raise ConfigError(f"topic option {given}: {error}") from None
    return encoded


def check_option(name: str, value: object) -> str:
    """The form in which one option (a field of `TopicOptions`) is stored, or `InvalidMessage`."""
    return _CODECS[name].encode(value)


def _unknown(given: str) -> str:
    near = difflib.get_close_matches(given.replace("-", "_").lower(), _CODECS, n=1, cutoff=0.5)
    cure = f"did you mean {near[0]}?" if near else f"there are {', '.join(_CODECS)}"
    return f"there is no topic option {given!r}; {cure}"


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _duration(low: timedelta, high: timedelta, *, or_zero: bool = False) -> _Codec:
    def written(value: object) -> str:
        duration = parse_duration(value)
        if not (low <= duration <= high or (or_zero and not duration)):
            zero = "0, or " if or_zero else ""
            shown = human(duration_ms(duration))
            bounds = f"{zero}{human(duration_ms(low))} to {human(duration_ms(high))}"
            raise InvalidMessage(f"{shown} is out of range; write {bounds}")
        return str(duration_ms(duration))

    return _Codec(written, lambda text: timedelta(milliseconds=int(text)))


def _count(highest: int, *, unlimited: bool = False) -> _Codec:
    def written(value: object) -> str:
        if unlimited and (value is None or value in ("", "none", "unlimited")):
            return ""
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 18:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= highest:
            rest = " or 'unlimited'" if unlimited else ""
            raise InvalidMessage(f"{value!r} is not a whole number from 1 to {highest}{rest}")
        return str(value)

    def read(text: str) -> int | None:
        return None if unlimited and not text else int(text)

    return _Codec(written, read)


def _flag(value: object) -> str:
    text = str(value).lower()
    if text in ("true", "1", "yes", "on"):
        return "1"
    if text in ("false", "0", "no", "off"):
        return "0"
    raise InvalidMessage(f"{value!r} is neither true nor false")


_CODECS: dict[str, _Codec] = {
    "ack_timeout": _duration(MIN_ACK_TIMEOUT, MAX_ACK_TIMEOUT),
    "retry_delays": _Codec(lambda value: RetryPolicy.parse(value).encode(), RetryPolicy.decode),
    "max_ready": _count(LARGEST_COUNT),
    "capacity": _count(LARGEST_COUNT, unlimited=True),
    "retention": _duration(MIN_RETENTION, MAX_DELAY, or_zero=True),
    "dedupe_for": _duration(MIN_RETENTION, MAX_DELAY),
    "garbage_keep": _duration(timedelta(milliseconds=1), MAX_DELAY),
    "journal": _Codec(_flag, lambda text: text == "1"),
    "journal_max": _count(LARGEST_COUNT),
    "max_body_bytes": _count(LARGEST_BODY_BYTES),
    "shards": _count(MOST_SHARDS),
    "paused": _Codec(_flag, lambda text: text == "1"),
}
