"""Lanes: the rate at which a lane may start messages, their order, their cost and slack."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from typing import Self

from lisa.core.model.clock import (
    duration_ms,
    human,
    in_one_unit,
    named_duration,
    parse_duration,
)
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import check_group, check_key
from lisa.core.model.sharding import KEY_END, share

MAX_COUNT = 1_000_000
MAX_BURST = 100_000
MAX_PERIOD = timedelta(days=30)
MAX_COST = 1_000
MAX_WEIGHT = 1_000
MAX_SLACK = timedelta(days=30)

USUAL_BURST_MS = 20
"""Without a burst of its own, a rate lets through at once what it allows in this time.

Managers and consumers act a millisecond or so late, which would slow down higher rates.
"""

_EXACT_US = 2**53
"""Scripts count in microseconds, in numbers that are exact below this."""

_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_RATE = re.compile(r"([0-9]{1,9})\s*(?:/|per)\s*([^,]*?)(?:\s*,\s*burst\s+([0-9]{1,9}))?")


class KeyOrder(StrEnum):
    """One message of a key at a time, in the order of their due times.

    CONTINUE: after a message is dead, the next one of its key follows. HOLD: the key waits until
    the dead message is requeued, cancelled or purged.
    """

    CONTINUE = "continue"
    HOLD = "hold"


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `count` messages per `period`, evenly spread; `burst` of them may start at once."""

    count: int
    period: timedelta = timedelta(seconds=1)
    burst: int = 1

    @classmethod
    def of(cls, count: int, period: timedelta) -> Self:
        """A rate with the usual burst."""
        return cls(count, period, max(1, -(-count * USUAL_BURST_MS // max(1, duration_ms(period)))))

    def __str__(self) -> str:
        """The text that `parse` reads: `10/m`, `5 per 90s`, or `10/m, burst 3`."""
        period_ms = duration_ms(self.period)
        unit = next((unit for unit, ms in _UNITS_MS.items() if ms == period_ms), None)
        per = f"/{unit}" if unit else f" per {in_one_unit(period_ms)}"
        is_usual = self == Rate.of(self.count, self.period)
        return f"{self.count}{per}" + ("" if is_usual else f", burst {self.burst}")

    @classmethod
    def parse(cls, value: object) -> Rate:
        """Read `10/m`, `5 per 90s` or `2/s, burst 10`. Raises InvalidMessage."""
        if isinstance(value, Rate):
            return value.check()
        found = _RATE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
        if not found:
            raise InvalidMessage(f"not a rate: {value!r}; write '10/m' or '5 per 90s, burst 3'")
        unit_ms = _UNITS_MS.get(found[2])
        period = timedelta(milliseconds=unit_ms) if unit_ms else parse_duration(found[2])
        rate = cls.of(int(found[1]), period)
        return (replace(rate, burst=int(found[3])) if found[3] else rate).check()

    def check(self) -> Rate:
        """The rate itself. Raises InvalidMessage if a number is out of range."""
        if not 1 <= self.count <= MAX_COUNT:
            raise InvalidMessage(f"a rate is 1 to {MAX_COUNT:,} messages, not {self.count:,}")
        period_ms = duration_ms(self.period)
        if not 1 <= period_ms <= duration_ms(MAX_PERIOD):
            raise InvalidMessage(
                f"a rate is per 1ms to {MAX_PERIOD.days}d, not per {human(period_ms)}"
            )
        if not 1 <= self.burst <= MAX_BURST:
            raise InvalidMessage(f"the burst of a rate is 1 to {MAX_BURST:,}, not {self.burst:,}")
        if self.burst * period_ms * 1_000 >= _EXACT_US:
            raise InvalidMessage(
                f"a burst of {self.burst:,} is too large for a rate per {human(period_ms)}"
            )
        return self

    def encode(self) -> str:
        """The form that scripts read: count, period in ms, burst, as in `10,60000,3`."""
        return f"{self.count},{duration_ms(self.period)},{self.burst}"

    @classmethod
    def decode(cls, text: str) -> Self:
        """The reverse of `encode`. Raises ValueError."""
        count, period_ms, burst = map(int, text.split(","))
        return cls(count, timedelta(milliseconds=period_ms), burst)

    def share(self, shards: int) -> Rate:
        """The rate of one of several shards."""
        count, period = self.count, self.period
        if count % shards:
            period *= shards
        else:
            count //= shards
        exact = (_EXACT_US - 1) // (duration_ms(period) * 1_000)
        return Rate(count, period, min(share(self.burst, shards), exact))


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one key, in place of its topic's; None for those that it does not have.

    weight: its share where a group's keys take turns, 1 by default: twice the weight starts twice
    as many messages.
    """

    rate: Rate | None = None
    concurrency: int | None = None
    weight: int | None = None

    @classmethod
    def parse(cls, rate: object = None, concurrency: object = None, weight: object = None) -> Self:
        """Check limits; the rate may be text. Raises InvalidMessage."""
        return cls(
            None if rate is None else Rate.parse(rate),
            _checked_count("concurrency", concurrency, MAX_COUNT),
            _checked_count("weight", weight, MAX_WEIGHT),
        )

    @classmethod
    def of(cls, given: object) -> Self:
        """Limits from a mapping of some of their names to values. Raises InvalidMessage."""
        names = {"rate", "concurrency", "weight"}
        if not isinstance(given, Mapping) or not given or given.keys() - names:
            raise InvalidMessage("the limits of a key are some of rate, concurrency and weight")
        return cls.parse(**given)

    def encode(self) -> str:
        """The form that scripts read, as in `rate=2,1000,1;concurrency=4;weight=3`."""
        rate = self.rate and self.rate.encode()
        parts = {"rate": rate, "concurrency": self.concurrency, "weight": self.weight}
        return ";".join(f"{name}={value}" for name, value in parts.items() if value is not None)

    @classmethod
    def decode(cls, text: str) -> Self:
        """The reverse of `encode`. Raises ValueError."""
        parts = dict(part.split("=") for part in text.split(";") if part)
        rate, concurrency, weight = map(parts.get, ("rate", "concurrency", "weight"))
        return cls(
            Rate.decode(rate) if rate else None,
            int(concurrency) if concurrency else None,
            int(weight) if weight else None,
        )


def limits_field(key: str, group: str | None = None) -> str:
    """Where the limits of a key are stored, for all groups or for one. Raises InvalidMessage."""
    return f"{check_group(group)}{KEY_END}{check_key(key)}" if group else check_key(key)


def shown_limits_field(field: str) -> str:
    """The reverse of `limits_field`, for people."""
    group, of_group, key = field.partition(KEY_END)
    return f"key {key} in group {group}" if of_group else f"key {field}"


def _checked_count(name: str, value: object, most: int) -> int | None:
    if value is not None and (type(value) is not int or not 1 <= value <= most):
        raise InvalidMessage(f"{name} is a whole number from 1 to {most:,}, not {value!r}")
    return value


def own_lane(cost: object, slack: object) -> str | None:
    """The cost and the slack of a single message in their stored form; None if it has neither.

    Raises InvalidMessage.
    """
    if cost is None and slack is None:
        return None
    cost = _checked_count("cost", cost, MAX_COST)
    slack_ms: int | str = "" if slack is None else duration_ms(named_duration("slack", slack))
    if slack_ms and int(slack_ms) > duration_ms(MAX_SLACK):
        raise InvalidMessage(f"slack is at most {MAX_SLACK.days}d, not {human(int(slack_ms))}")
    return f"{cost or ''},{slack_ms}"


def cost_and_slack(stored: str | None) -> tuple[int | None, timedelta | None]:
    """The reverse of `own_lane`; further parts, which scripts add, are ignored."""
    cost, slack_ms, *_ = [*(stored or "").split(","), ""]
    return (int(cost) if cost else None), (
        timedelta(milliseconds=int(slack_ms)) if slack_ms else None
    )
