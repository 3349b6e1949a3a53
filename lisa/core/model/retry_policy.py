"""Retry policies: a list of delays, in which item *n* is the pause before retry *n*.

The length of the list is the number of retries. A fixed pause, exponential back-off with a cap, and
an explicit list such as `0,0,2m,10m,10m,1h,2h,6h,15h` (RocketMQ's schedule) all compile to this
form, so scripts and clients in other languages implement only one.
"""

import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice, repeat
from typing import Any, Self

from lisa.core.model.clock import duration_ms, in_one_unit, named_duration, parse_duration
from lisa.core.model.errors import InvalidMessage

MAX_RETRIES = 1_000
MAX_DELAY = timedelta(days=3_650)
DEFAULT_DELAY = timedelta(seconds=20)
DEFAULT_RETRIES = 10
DEFAULT_CAP = timedelta(hours=1)

_TIMES = re.compile(r"\s*([1-9][0-9]{0,5})\s*x\s+(.*)")
_SHOWN_JITTER = re.compile(r",\s*jitter\s+")
_FIXED = ("delay", "count", "jitter")
_EXPONENTIAL = ("initial", "factor", "cap", "count", "jitter")
_FORMS = "'fixed', 'exponential' or 'delays'"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The pauses between attempts, and the random extension of each.

    `delays_ms`: milliseconds before each retry; empty for a single attempt.
    `jitter`: a fraction j from 0 to 1. A pause of d lasts d * (1 + j * u) with u drawn from [0, 1),
    so it is never shorter than d.

    Raises InvalidMessage (a `ValueError`) for an invalid policy.
    """

    delays_ms: tuple[int, ...]
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if len(self.delays_ms) > MAX_RETRIES:
            raise InvalidMessage(
                f"{len(self.delays_ms)} retries are too many; the maximum is {MAX_RETRIES}"
            )
        longest = duration_ms(MAX_DELAY)
        for delay_ms in self.delays_ms:
            if not 0 <= delay_ms <= longest:
                raise InvalidMessage(
                    f"a retry delay of {delay_ms} ms is outside 0 to {MAX_DELAY.days} days"
                )
        if not 0 <= self.jitter <= 1:
            raise InvalidMessage(f"jitter is a fraction from 0 to 1, not {self.jitter!r}")

    @classmethod
    def parse(cls, value: object) -> "RetryPolicy":
        """Read a policy.

        Accepts `"0,0,2m,10m"`, optionally with a jitter (`"2m,10m~0.2"`), or in the form that
        people are shown (`"10 x 20s, 2m, jitter 0.2"`); a sequence of timedelta or text with a
        unit; `""`, `"none"` or `[]` for no retries; or a mapping:
        `{"fixed": {"delay": "20s", "count": 10}}`,
        `{"exponential": {"initial": "1s", "factor": 2, "cap": "1h", "count": 12, "jitter": 0.1}}`
        or `{"delays": [...], "jitter": 0.2}`. Raises InvalidMessage.
        """
        if isinstance(value, RetryPolicy):
            return value
        if isinstance(value, str):
            delays, jitter = _split(_SHOWN_JITTER.sub("~", value.strip()))
            if delays.strip() in ("", "none"):
                return cls.of(())
            return cls.of(_repeated(delays.split(",")), jitter=jitter)
        if isinstance(value, Mapping):
            return _from_mapping(value)
        if isinstance(value, Iterable) and not isinstance(value, bytes | timedelta):
            return cls.of(value)
        raise InvalidMessage(
            f"not a retry policy: {value!r}; write delays, as in '0,2m,10m', or [] for no retries"
        )

    @classmethod
    def of(cls, delays: Iterable[object], *, jitter: float = 0.0) -> Self:
        """A policy from a list of delays: timedelta, or text with a unit."""
        first = islice(delays, MAX_RETRIES + 1)  # of too many, the others are not parsed
        return cls(tuple(duration_ms(parse_duration(delay)) for delay in first), jitter)

    @classmethod
    def fixed(
        cls,
        *,
        delay: timedelta | str = DEFAULT_DELAY,
        count: int = DEFAULT_RETRIES,
        jitter: float = 0.0,
    ) -> Self:
        """`count` retries, each after the same pause."""
        delay_ms = duration_ms(named_duration("delay", delay))
        return cls((delay_ms,) * _checked_count(count), _number("jitter", jitter))

    @classmethod
    def exponential(
        cls,
        *,
        initial: timedelta | str,
        factor: float = 2,
        cap: timedelta | str = DEFAULT_CAP,
        count: int = DEFAULT_RETRIES,
        jitter: float = 0.0,
    ) -> Self:
        """`count` retries; each pause is `factor` times the previous one, up to `cap`."""
        factor = _number("factor", factor)
        if not 1 <= factor <= 1_000:
            raise InvalidMessage(f"factor must be between 1 and 1000, not {factor!r}")
        from fractions import Fraction  # late: few programs set pauses

        growth, cap_ms = Fraction(factor), duration_ms(named_duration("cap", cap))
        delays, pause = [], duration_ms(named_duration("initial", initial))
        if cap_ms < pause:
            raise InvalidMessage(f"cap {cap} is below initial {initial}; raise the cap")
        for _ in range(_checked_count(count)):
            delays.append(pause)
            # Rounded up at each step: exact for integer factors, and bounded by the cap.
            pause = min(cap_ms, -int(-pause * growth // 1))
        return cls(tuple(delays), _number("jitter", jitter))

    def pause_ms(self, attempt: int) -> int | None:
        """The pause after that failed attempt, from 1, with jitter; None if it was the last one."""
        if attempt > len(self.delays_ms):
            return None
        delay_ms = self.delays_ms[attempt - 1]
        return delay_ms + int(delay_ms * self.jitter * random.random()) if self.jitter else delay_ms

    def __str__(self) -> str:
        """A text that `parse` reads: `0s,2m~0.2`; empty without retries."""
        jitter = f"~{self.jitter!r}" if self.jitter and self.delays_ms else ""
        return ",".join(map(in_one_unit, self.delays_ms)) + jitter

    def encode(self) -> str:
        """The form that scripts read: milliseconds, then the jitter if any: `"0,0,120000~0.2"`.

        `""` means no retries.
        """
        delays = ",".join(map(str, self.delays_ms))
        return f"{delays}~{self.jitter!r}" if self.jitter and delays else delays

    @classmethod
    def decode(cls, text: str) -> Self:
        """The reverse of `encode`. Raises InvalidMessage."""
        delays, jitter = _split(text)
        try:
            return cls(tuple(map(int, delays.split(","))) if delays else (), jitter)
        except InvalidMessage:
            raise
        except ValueError:
            raise InvalidMessage(f"not an encoded retry policy: {text!r}") from None


def _repeated(delays: Iterable[str]) -> Iterator[str]:
    """Each delay as often as it says: `10 x 20s`."""
    for delay in delays:
        found = _TIMES.fullmatch(delay)
        yield from repeat(found[2], int(found[1])) if found else (delay,)


def _split(text: str) -> tuple[str, float]:
    """Split `"<delays>~<jitter>"`."""
    delays, mark, jitter = text.partition("~")
    return delays, _number("jitter", jitter) if mark else 0.0


def _from_mapping(value: Mapping[object, object]) -> RetryPolicy:
    forms = [form for form in ("fixed", "exponential", "delays") if form in value]
    if len(forms) != 1:
        raise InvalidMessage(f"a retry policy needs exactly one of {_FORMS}: {dict(value)!r}")
    (form,) = forms
    if form == "delays":
        _check_keys("a list of delays", value, ("delays", "jitter"))
        listed = RetryPolicy.parse(value["delays"])
        return replace(listed, jitter=_number("jitter", value.get("jitter", listed.jitter)))
    _check_keys("a retry policy", value, (form,))
    given: Any = value[form]
    if not isinstance(given, Mapping):
        raise InvalidMessage(f"{form!r} must be a mapping of its settings, not {given!r}")
    make, settings = (
        (RetryPolicy.fixed, _FIXED) if form == "fixed" else (RetryPolicy.exponential, _EXPONENTIAL)
    )
    _check_keys(form, given, settings)
    if settings[0] not in given:
        raise InvalidMessage(f"{form!r} needs {settings[0]!r}, as in '{settings[0]}: 20s'")
    return make(**given)


def _check_keys(what: str, given: Mapping[object, object], allowed: tuple[str, ...]) -> None:
    for key in given:
        if key not in allowed:
            raise InvalidMessage(f"{what} has no {key!r}; it takes {', '.join(allowed)}")


def _checked_count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_RETRIES:
        raise InvalidMessage(f"the number of retries must be 0 to {MAX_RETRIES}, not {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidMessage(f"{name} is a number, not {value!r}") from None


DEFAULT_POLICY = RetryPolicy.fixed()
"""Ten retries, 20 s apart."""
