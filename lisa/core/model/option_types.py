"""Types of topic options: validation, the form stored in Redis, and the forms shown."""

# ruff: noqa: D102 - OptionType documents the methods of its subclasses

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any, ClassVar

from lisa.core.model.clock import duration_ms, exact, human, in_one_unit, parse_duration
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.late import LatePolicy, Ramp
from lisa.core.model.retry_policy import RetryPolicy

_WHOLE = re.compile(r"[0-9]{1,18}|[0-9]{1,3}(,[0-9]{3}){1,5}")


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
        ms = duration_ms(value)
        shown = human(ms)
        return shown if parse_duration(shown) == value else exact(ms)


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
        jitter = f"~{value.jitter!r}" if value.jitter and value.delays_ms else ""
        return ",".join(map(in_one_unit, value.delays_ms)) + jitter

    def show(self, value: RetryPolicy) -> str:
        runs = [(ms, sum(1 for _ in same)) for ms, same in groupby(value.delays_ms)]
        pauses = ", ".join(exact(ms) if n == 1 else f"{n} x {exact(ms)}" for ms, n in runs)
        return (pauses or "none") + (f", jitter {value.jitter!r}" if value.jitter else "")


class _TextType(OptionType):
    """A value that is None, stored as "", or of a class with `parse`, `encode` and `decode`."""

    kind: ClassVar[type[LatePolicy | Ramp]]

    def encode(self, value: object) -> str:
        return "" if value in (None, "", "none") else self.kind.parse(value).encode()

    def decode(self, text: str) -> LatePolicy | Ramp | None:
        return self.kind.decode(text) if text else None

    def plain(self, value: LatePolicy | Ramp | None) -> str:
        return self.show(value)

    def show(self, value: LatePolicy | Ramp | None) -> str:
        return "none" if value is None else str(value)


class LateType(_TextType):
    """A late policy, or None."""

    kind = LatePolicy
    bounds = "run, skip, garbage or collapse, then `after` and 1s or more; or none"


class RampType(_TextType):
    """A ramp, or None."""

    kind = Ramp
    bounds = "messages per s, m or h, and perhaps `newest first`; or none"
