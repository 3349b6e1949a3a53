"""Late policies and ramps: what happens to messages whose due time passed during an outage."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from typing import NamedTuple, Self

from lisa.core.model.clock import duration_ms, human, in_one_unit, named_duration, parse_duration
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.retry_policy import MAX_DELAY

MIN_AFTER = timedelta(seconds=1)
"""A manager that takes over from another may be late by less than a second without an outage."""

TOPICS_DELAYS = "*"
"""In a stored message policy, in place of the message's own retry delays: it has none."""

MAX_RATE = 1_000_000
_PER_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000}
_RAMP = re.compile(r"([0-9]{1,7})\s*/\s*([smh])(?:[\s,]+(oldest|newest)(?:\s+first)?)?")
_TEXT = re.compile(r"(\w+)(?:\s+after\s+(\S.*))?")


class LateAction(StrEnum):
    """What happens to a late message."""

    RUN = "run"
    SKIP = "skip"
    GARBAGE = "garbage"
    COLLAPSE = "collapse"


@dataclass(frozen=True, slots=True)
class LatePolicy:
    """What happens to a message whose first promotion comes more than `after` past its due time.

    Raises InvalidMessage (a `ValueError`) for a bound out of range.
    """

    after: timedelta
    then: LateAction

    def __post_init__(self) -> None:
        """Check the bound."""
        if self.then is not LateAction.RUN and not MIN_AFTER <= self.after <= MAX_DELAY:
            raise InvalidMessage(
                f"late: after is {human(duration_ms(MIN_AFTER))} to {MAX_DELAY.days}d, "
                f"not {human(duration_ms(self.after))}"
            )

    def __str__(self) -> str:
        """The text that `parse` reads: `skip after 10m`, or `run`."""
        if self.then is LateAction.RUN:
            return "run"
        after_ms = duration_ms(self.after)
        after = human(after_ms).replace(" ", "")  # in at most two units
        if parse_duration(after) != self.after:
            after = in_one_unit(after_ms)
        return f"{self.then} after {after}"

    @classmethod
    def parse(cls, value: object) -> LatePolicy:
        """Read a policy: `{"after": "10m", "then": "skip"}`, `"skip after 10m"` or `"run"`.

        Raises InvalidMessage.
        """
        if isinstance(value, LatePolicy):
            return value
        if isinstance(value, str) and (found := _TEXT.fullmatch(value.strip())):
            value = {"then": found[1], "after": found[2]}
        if not isinstance(value, Mapping) or value.keys() - {"after", "then"}:
            raise InvalidMessage(
                f"not a late policy: {value!r}; write {{'after': '10m', 'then': 'skip'}} "
                "or 'skip after 10m'"
            )
        after, then = value.get("after"), value.get("then")
        if then not in tuple(LateAction):
            raise InvalidMessage(f"late: then is one of {', '.join(LateAction)}, not {then!r}")
        action = LateAction(then)
        if after is None:
            if action is not LateAction.RUN:
                raise InvalidMessage(f"late: {action} needs after, as in '{action} after 10m'")
            after = timedelta(0)
        return cls(named_duration("after", after), action)

    def encode(self) -> str:
        """The form that scripts read: milliseconds and the action, as in `600000,skip`."""
        return f"{duration_ms(self.after)},{self.then}"

    @classmethod
    def decode(cls, text: str) -> Self:
        """The reverse of `encode`. Raises ValueError."""
        after, _, then = text.partition(",")
        return cls(timedelta(milliseconds=int(after)), LateAction(then))


def message_policy(retry: str | None, late: str | None, lane: str | None = None) -> str | None:
    """A message's own policies in their stored form; None if it has none.

    retry, late, lane: encoded; None if the message has no such policy. The result is the retry
    policy alone, `<retry policy>;<late policy>`, or `<retry policy>;<late policy>;<cost,slack>`,
    with `*` in place of a missing retry policy, and nothing in place of a missing late policy.
    """
    if late is None and lane is None:
        return retry
    kept = TOPICS_DELAYS if retry is None else retry
    return f"{kept};{late or ''}" + (f";{lane}" if lane else "")


class MessagePolicies(NamedTuple):
    """The encoded parts of a stored message policy; None for a missing one."""

    retry: str | None = None
    late: str | None = None
    lane: str | None = None


def split_policy(stored: str | None) -> MessagePolicies:
    """The reverse of `message_policy`."""
    if stored is None:
        return MessagePolicies()
    retry, late, lane, *_ = [*stored.split(";"), "", ""]
    return MessagePolicies(None if retry == TOPICS_DELAYS else retry, late or None, lane or None)


def own_late(value: object) -> str | None:
    """The encoded late policy of a single message; None for None. Raises InvalidMessage.

    `collapse` keeps the newest occurrence of a schedule, so it needs a schedule or a topic.
    """
    if value is None:
        return None
    policy = LatePolicy.parse(value)
    if policy.then is LateAction.COLLAPSE:
        raise InvalidMessage(
            "late: collapse keeps the newest occurrence of a schedule; a single message takes "
            "run, skip or garbage"
        )
    return policy.encode()


def late_text(stored: str | None) -> str | None:
    """An encoded late policy as text for people; None for None."""
    return None if stored is None else str(LatePolicy.decode(stored))


@dataclass(frozen=True, slots=True)
class Ramp:
    """At most `count` messages of a backlog are promoted per `per`, the oldest or newest first.

    Raises InvalidMessage for a rate out of range.
    """

    count: int
    per: timedelta = timedelta(seconds=1)
    newest_first: bool = False

    def __post_init__(self) -> None:
        """Check the rate."""
        if not 1 <= self.count <= MAX_RATE:
            raise InvalidMessage(f"ramp: a rate is 1 to {MAX_RATE:,} messages, not {self.count:,}")

    def __str__(self) -> str:
        """The text that `parse` reads: `200/s`, or `200/s newest first`."""
        units = {ms: unit for unit, ms in _PER_MS.items()}
        unit = units.get(duration_ms(self.per)) or human(duration_ms(self.per))
        return f"{self.count}/{unit}" + (" newest first" if self.newest_first else "")

    @classmethod
    def parse(cls, value: object) -> Ramp:
        """Read `200/s`, `30/m` or `1000/h`, followed by `newest first` or `oldest first`.

        Raises InvalidMessage.
        """
        if isinstance(value, Ramp):
            return value
        found = _RAMP.fullmatch(value.strip().lower()) if isinstance(value, str) else None
        if not found:
            raise InvalidMessage(f"not a ramp: {value!r}; write '200/s' or '200/s newest first'")
        per = timedelta(milliseconds=_PER_MS[found[2]])
        return cls(int(found[1]), per, found[3] == "newest")

    def encode(self) -> str:
        """The form that scripts read: messages, milliseconds, order, as in `200,1000,oldest`."""
        return f"{self.count},{duration_ms(self.per)},{'newest' if self.newest_first else 'oldest'}"

    @classmethod
    def decode(cls, text: str) -> Self:
        """The reverse of `encode`. Raises ValueError."""
        count, per, order = text.split(",")
        return cls(int(count), timedelta(milliseconds=int(per)), order == "newest")

    def share(self, shards: int) -> Ramp:
        """The ramp of one of several shards."""
        return replace(self, per=self.per * shards)

    def next_ms(self, used_us: int) -> int:
        """When the next message may come if the budget is used up to an instant in epoch us."""
        pause_us = self.per / self.count / timedelta(microseconds=1)
        return math.ceil((used_us + pause_us) / 1000)

    def lasts(self, backlog: int) -> timedelta:
        """How long the promotion of a backlog takes."""
        return backlog * self.per / self.count
